"""A directory that appears whole or not at all."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from autoematic_jax.errors import CheckpointError


@contextlib.contextmanager
def atomic_directory(destination: Path, *, force: bool) -> Iterator[Path]:
  """Yields a directory beside `destination` and renames it at the end.

  Left by any exception, the directory is removed and the destination is
  untouched. What killed runs left behind is removed first.

  Args:
    destination: Where the finished directory goes.
    force: Whether an existing destination is replaced, once the new one is
      complete.

  Raises:
    CheckpointError: The destination exists and `force` is False.
  """
  if destination.exists() and not force:
    raise CheckpointError(
        f"{destination} already exists; --force replaces it"
    )
  destination.parent.mkdir(parents=True, exist_ok=True)
  _remove_abandoned(destination)
  partial = _beside(destination, "partial", os.getpid())
  partial.mkdir()
  try:
    yield partial
    _swap(partial, destination)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _beside(destination, kind, pid):
  return destination.with_name(f"{destination.name}.{kind}-{pid}")


def _swap(partial, destination):
  if not destination.exists():
    partial.rename(destination)
    return
  old = _beside(destination, "replaced", os.getpid())
  destination.rename(old)
  partial.rename(destination)
  if old.is_dir():
    shutil.rmtree(old)
  else:
    old.unlink()


def _remove_abandoned(destination):
  pattern = re.compile(
      re.escape(destination.name) + r"\.partial-(\d+)"
  )
  for path in destination.parent.iterdir():
    match = pattern.fullmatch(path.name)
    if match and not _alive(int(match[1])):
      shutil.rmtree(path)


def _alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True
