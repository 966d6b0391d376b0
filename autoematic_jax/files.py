"""Files that are whole or not there."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
  """Writes a file beside its place and moves it there once it is whole.

  Whatever interrupts the writing leaves the old file, or none.

  Args:
    path: Where the file goes.

  Yields:
    Where to write it; the name ends as `path` does.
  """
  partial = path.with_name(f".partial-{path.name}")
  try:
    yield partial
    with partial.open("rb") as file:
      os.fsync(file.fileno())
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)
