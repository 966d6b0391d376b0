"""Measurements as JSON, with what they were made on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import environment


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
    Path(path).write_text(json.dumps(report, indent=2) + "\n")
  except OSError as error:
    raise AutoematicError(f"cannot write {path}: {error}") from error
