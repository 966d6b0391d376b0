"""The Makefile, with a stand-in for the environment that it makes."""

import os
import shutil
import subprocess
import time

import pytest

pytestmark = pytest.mark.skipif(
  shutil.which("make") is None, reason="make is not installed"
)

RECORDER = '#!/bin/sh\nprintf "%s\\0" "$@" > "$RECORD"\n'


@pytest.fixture
def stand_in(tmp_path):
  """An environment that is up to date, and a checkpoint that is there."""
  binaries = tmp_path / "venv" / "bin"
  binaries.mkdir(parents=True)
  command = binaries / "autoematic"
  command.write_text(RECORDER)
  command.chmod(0o755)
  checkpoint = tmp_path / "checkpoint"
  checkpoint.mkdir()
  (checkpoint / "autoematic.json").touch()
  later = time.time() + 3600
  for stamp in (".created", ".demo"):
    (tmp_path / "venv" / stamp).touch()
    os.utime(tmp_path / "venv" / stamp, (later, later))
  return tmp_path


def make(root, *arguments, **environment):
  inherited = {k: v for k, v in os.environ.items() if k != "PROMPT"}
  for name in ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS"):
    inherited.pop(name, None)
  return subprocess.run(
    ["make", *arguments],
    cwd=root,
    env={**inherited, **environment},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  "prompt",
  [
    "What is JAX?",
    """It's "quoted" twice""",
    "costs $5, $$5 or $(HOME) and ${HOME}",
    "back\\slash `id` $(id) ; | & # * ~",
    "--help",
    "",
    "two\nlines",
  ],
)
@pytest.mark.parametrize("given", ["argument", "environment"])
def test_prompt_arrives_as_it_was_typed(root, stand_in, prompt, given):
  record = stand_in / "record"
  done = make(
    root,
    "demo",
    f"VENV={stand_in / 'venv'}",
    f"DEMO={stand_in / 'checkpoint'}",
    *([f"PROMPT={prompt}"] if given == "argument" else []),
    RECORD=str(record),
    **({"PROMPT": prompt} if given == "environment" else {}),
  )
  assert done.returncode == 0, done.stderr
  arguments = record.read_text().split("\0")[:-1]
  assert arguments[0] == "generate"
  assert arguments[2] == f"--prompt={prompt}"


def test_old_python_is_refused_by_name(root, tmp_path):
  old = tmp_path / "old-python"
  old.write_text("#!/bin/sh\nexit 1\n")
  old.chmod(0o755)
  done = make(root, "test", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
  assert done.returncode != 0
  assert "Python 3.11 or newer is needed" in done.stderr
  assert str(old) in done.stderr
  assert not (tmp_path / "venv").exists()


def test_make_alone_lists_its_targets(root):
  done = make(root)
  for target in ("demo", "test", "test-gpu", "lint", "format", "clean"):
    assert f"make {target} " in done.stdout
