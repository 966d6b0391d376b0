"""A directory that appears whole or not at all."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Set
from pathlib import Path

from autoematic_jax.errors import CheckpointError

UNFINISHED = re.compile(r"(.+)\.(partial|replaced)-(\d+)")
"""Names of what a run works on: destination, kind and process id."""


def check_destination(
  destination: Path, *, force: bool, ours: Set[str]
) -> None:
  """Refuses a destination that must not be replaced.

  Args:
    destination: Where a directory is about to be made.
    force: Whether an existing one may be replaced.
    ours: Names that a directory of ours holds. One with anything else beside
      them is never replaced: it would be deleted.

  Raises:
    CheckpointError: Something else is there, or `force` is False.
  """
  if not destination.exists():
    return
  if not destination.is_dir():
    raise CheckpointError(f"{destination} exists and is not a directory")
  foreign = sorted({path.name for path in destination.iterdir()} - ours)
  if foreign:
    raise CheckpointError(
      f"{destination} exists and is not a converted checkpoint (it holds"
      f" {foreign[0]}); choose another destination"
    )
  if not force:
    raise CheckpointError(f"{destination} already exists; --force replaces it")


@contextlib.contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
  """Yields a directory beside `destination` and renames it at the end.

  Left by any exception, the directory is removed and the destination is
  untouched; an existing one is replaced once the new one is complete. What
  killed runs left behind is removed first.

  Args:
    destination: Where the finished directory goes; not a link.
  """
  destination.parent.mkdir(parents=True, exist_ok=True)
  _remove_abandoned(destination)
  partial = _beside(destination, "partial")
  partial.mkdir()
  try:
    yield partial
    _swap(partial, destination)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _beside(destination, kind):
  return destination.with_name(f"{destination.name}.{kind}-{os.getpid()}")


def _swap(partial, destination):
  if not destination.exists():
    partial.rename(destination)
    return
  old = _beside(destination, "replaced")
  destination.rename(old)
  try:
    partial.rename(destination)
  except BaseException:
    old.rename(destination)
    raise
  shutil.rmtree(old)


def _remove_abandoned(destination):
  """Removes what dead runs left; puts back what one was replacing."""
  for path in list(destination.parent.iterdir()):
    match = UNFINISHED.fullmatch(path.name)
    if match is None or match[1] != destination.name:
      continue
    kind, pid = match[2], int(match[3])
    # Our own id is that of a dead run too: containers reuse them.
    if pid != os.getpid() and _alive(pid):
      continue
    if kind == "replaced" and not destination.exists():
      path.rename(destination)
    else:
      shutil.rmtree(path)


def _alive(pid):
  try:
    os.kill(pid, 0)
  except (ProcessLookupError, OverflowError):
    return False
  except PermissionError:
    return True
  return True
