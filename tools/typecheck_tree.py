"""Lays a tree of links in which the packages lie as they do once installed.

The checkout keeps `models/` beside `autoematic_jax/`, though it is imported as
`autoematic_jax.models`. Python follows the installed mapping; a type checker
reads files, so it gets `build/typecheck/autoematic_jax/`, one link for each
module.
"""

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typecheck"


def lay_tree() -> None:
  """Replaces the tree by one link for each Python file of each package."""
  shutil.rmtree(TREE, ignore_errors=True)
  settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
  folders = settings["tool"]["setuptools"]["package-dir"]
  for package in settings["tool"]["setuptools"]["packages"]:
    destination = TREE.joinpath(*package.split("."))
    destination.mkdir(parents=True)
    for source in package_folder(package, folders).iterdir():
      if source.suffix == ".py" or source.name == "py.typed":
        (destination / source.name).symlink_to(source)


def package_folder(package: str, folders: dict[str, str]) -> Path:
  """The checkout's folder of `package`, by its nearest mapped ancestor."""
  parts = package.split(".")
  for end in range(len(parts), 0, -1):
    mapped = folders.get(".".join(parts[:end]))
    if mapped is not None:
      return ROOT.joinpath(mapped, *parts[end:])
  return ROOT.joinpath(*parts)


if __name__ == "__main__":
  lay_tree()
