"""One Orbax item for each layer, uncompressed so that sizes are honest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from autoematic_jax.checkpoints.layout import Arrays
from autoematic_jax.errors import CheckpointError


def save_item(path: Path, tensors: Mapping[str, Arrays]) -> None:
  """Writes the arrays of several tensors as one item."""
  handler = ocp.PyTreeCheckpointHandler(use_compression=False)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(dict(tensors)))


def restore_item(
    path: Path, expected: Mapping[str, Mapping[str, Any]]
) -> dict[str, Arrays]:
  """Reads an item whose arrays must be exactly what the metadata says.

  Orbax casts to whatever is asked for, so nothing is asked for: shapes and
  dtypes are compared as they are stored.

  Args:
    path: The item's directory.
    expected: For each tensor, `{field: {"shape": ..., "dtype": ...}}`.

  Returns:
    The arrays of each tensor.

  Raises:
    CheckpointError: The item is missing, damaged or not what is expected.
  """
  if not path.is_dir():
    raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
  handler = ocp.PyTreeCheckpointHandler(use_compression=False)
  try:
    with ocp.Checkpointer(handler) as checkpointer:
      stored = checkpointer.metadata(path.resolve()).item_metadata.tree
      _compare(path, stored, expected)
      restore = jax.tree.map(
          lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
          {name: dict(fields) for name, fields in stored.items()},
          is_leaf=lambda node: not isinstance(node, dict),
      )
      arrays = checkpointer.restore(
          path.resolve(), args=ocp.args.PyTreeRestore(restore_args=restore)
      )
  except CheckpointError:
    raise
  except Exception as error:  # Orbax and tensorstore raise many kinds.
    first_line = str(error).strip().splitlines()[:1]
    raise CheckpointError(
        f"{path} cannot be read: {type(error).__name__}:"
        f" {' '.join(first_line)}"
    ) from error
  _compare(path, arrays, expected)
  return arrays


def _compare(path, stored, expected):
  if set(stored) != set(expected):
    difference = sorted(set(stored) ^ set(expected))
    raise CheckpointError(
        f"{path.name} and the metadata disagree about tensors"
        f" {difference[:4]}"
    )
  for name, fields in expected.items():
    if set(stored[name]) != set(fields):
      raise CheckpointError(
          f"{name} is stored as {sorted(stored[name])}; the metadata says"
          f" {sorted(fields)}"
      )
    for field, spec in fields.items():
      array = stored[name][field]
      found = (list(array.shape), str(np.dtype(array.dtype)))
      wanted = (list(spec["shape"]), spec["dtype"])
      if found != wanted:
        raise CheckpointError(
            f"{name}/{field} is stored as {found[1]}{found[0]}; the metadata"
            f" says {wanted[1]}{wanted[0]}: the checkpoint was altered"
        )
