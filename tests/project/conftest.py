"""The checkout, and the files of it that would be published."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
  return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked_files(root) -> list[Path]:
  if not (root / ".git").exists():
    pytest.skip("not a git checkout: which files are published is unknown")
  listed = subprocess.run(
    ["git", "ls-files", "-z"],
    cwd=root,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  return [root / name for name in listed.split("\0") if name]
