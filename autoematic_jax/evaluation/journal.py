"""Finished measurements on disk, so that an interrupted run can go on."""

import json
from pathlib import Path
from typing import Any

from autoematic_jax.errors import AutoematicError

Record = dict[str, Any]
"""What was measured once, as JSON holds it."""


class Journal:
  """Records by key, in a file of one JSON object a line.

  The first line names what is measured; a file that names something else is
  refused rather than mixed in.
  """

  def __init__(self, path: str | None, subject: dict[str, Any]):
    self._path = Path(path) if path else None
    self._records: dict[tuple[str | int, ...], Record] = {}
    if self._path is None:
      return
    try:
      if self._path.exists():
        self._read(self._path, subject)
      else:
        self._path.write_text(json.dumps(subject) + "\n")
    except OSError as error:
      raise AutoematicError(f"--resume {path}: {error}") from error

  def _read(self, path, subject):
    text = path.read_text()
    first, *lines = text.splitlines() or [""]
    if first != json.dumps(subject):
      raise AutoematicError(
        f"--resume {path} holds another measurement; name another file"
      )
    for line in lines:
      try:
        entry = json.loads(line)
      except ValueError:
        continue  # The line that was being written when the run ended.
      self._records[tuple(entry["key"])] = entry["record"]
    if not text.endswith("\n"):
      with path.open("a") as file:
        file.write("\n")

  def find(self, *key: str | int) -> Record | None:
    """What was measured before, if it was."""
    return self._records.get(key)

  def add(self, *key: str | int, record: Record) -> None:
    """Keeps one finished measurement."""
    if self._path is not None:
      line = json.dumps({"key": key, "record": record})
      with self._path.open("a") as file:
        file.write(line + "\n")
