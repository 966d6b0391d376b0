"""JSON files beside weights."""

import json
from pathlib import Path
from typing import Any

from autoematic_jax.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object from a file.

  Raises:
    CheckpointError: The file is missing or holds no JSON object.
  """
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise CheckpointError(f"{path} is missing") from None
  except (OSError, ValueError, RecursionError) as error:
    raise CheckpointError(f"{path} cannot be read: {error}") from error
  if not isinstance(data, dict):
    raise CheckpointError(f"{path} does not hold a JSON object")
  return data
