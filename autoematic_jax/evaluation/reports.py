"""Measurements as JSON, with what they were made on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import environment
from autoematic_jax.files import replacing


def write(path: str, rows: Sequence[dict[str, Any]], **about: Any) -> None:
  """Writes rows with the command, machine and versions behind them.

  Args:
    path: File to write.
    rows: One JSON object a measurement.
    **about: Further fields of the report.

  Raises:
    AutoematicError: The file cannot be written.
  """
  report = {
    "command": environment.command(),
    "machine": environment.machine(),
    "versions": environment.versions(),
    **about,
    "rows": list(rows),
  }
  try:
    _save(Path(path), report)
  except OSError as error:
    raise AutoematicError(f"cannot write {path}: {error}") from error


def merge(
  path: Path,
  rows: Sequence[dict[str, Any]],
  *,
  model: str,
  keys: Sequence[str],
  command: str,
) -> None:
  """Puts a model's rows into a report of several models.

  Args:
    path: The report; made where it is missing.
    rows: Take the place of those that agree with one of them in all keys.
    model: Whose rows they are.
    keys: Fields that tell rows apart.
    command: What made them.
  """
  report: dict[str, Any] = {"rows": []}
  if path.exists():
    report = json.loads(path.read_text())

  def identity(row):
    return tuple(row[key] for key in keys)

  replaced = set(map(identity, rows))
  kept = [row for row in report["rows"] if identity(row) not in replaced]
  report["rows"] = [*kept, *rows]
  report["machine"] = environment.machine()
  report["versions"] = environment.versions()
  report.setdefault("command", {})[model] = command
  _save(path, report)


def _save(path, report):
  with replacing(path) as partial:
    partial.write_text(json.dumps(report, indent=1) + "\n")
