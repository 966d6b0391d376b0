"""One Orbax item for each layer, uncompressed so that sizes are honest."""

import errno
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from autoematic_jax.checkpoints.layout import Arrays
from autoematic_jax.checkpoints.layout import directory_bytes
from autoematic_jax.errors import CheckpointError

_ITEM_OVERHEAD = 1 << 18
"""Bytes that Orbax may add to the arrays of an item."""


def save_item(path: Path, tensors: Mapping[str, Arrays]) -> None:
  """Writes the arrays of several tensors as one item.

  Raises:
    OSError: The disk is full.
  """
  _require_space(path, tensors)
  # Orbax refuses arrays without elements; `restore_item` makes them anew.
  stored = {
    name: {field: array for field, array in fields.items() if array.size}
    for name, fields in tensors.items()
  }
  handler = ocp.PyTreeCheckpointHandler(use_compression=False)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(path.resolve(), args=ocp.args.PyTreeSave(stored))


def _require_space(path, tensors):
  """Meets a full disk here: Orbax's threads print pages about it."""
  arrays = [a for fields in tensors.values() for a in fields.values()]
  needed = sum(array.nbytes for array in arrays) + _ITEM_OVERHEAD
  path.parent.mkdir(exist_ok=True)
  free = shutil.disk_usage(path.parent).free
  if free < needed:
    raise OSError(
      errno.ENOSPC,
      f"{path.name} needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free",
    )


def restore_item(
  path: Path, expected: Mapping[str, Mapping[str, Any]], size: int
) -> dict[str, Arrays]:
  """Reads an item whose arrays must be exactly what the metadata says.

  Orbax casts to whatever is asked for, so nothing is asked for: shapes and
  dtypes are compared as they are stored.

  Args:
    path: The item's directory.
    expected: For each tensor, `{field: {"shape": ..., "dtype": ...}}`.
    size: Bytes of all its files.

  Returns:
    The arrays of each tensor.

  Raises:
    CheckpointError: The item is missing, damaged or not what is expected.
  """
  if not path.is_dir():
    raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
  # Before Orbax looks, whose threads print pages about lost bytes. A changed
  # dtype or shape is named below, so more bytes than expected may pass here.
  _check_size(path, size, math.inf)
  handler = ocp.PyTreeCheckpointHandler(use_compression=False)
  try:
    with ocp.Checkpointer(handler) as checkpointer:
      stored = checkpointer.metadata(path.resolve()).item_metadata.tree
      _compare(path, stored, _with_elements(expected))
      _check_size(path, size, size)
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
      f"{path} cannot be read: {type(error).__name__}: {' '.join(first_line)}"
    ) from error
  for name, fields in expected.items():
    for field, spec in fields.items():
      if field not in arrays[name]:
        arrays[name][field] = np.zeros(spec["shape"], spec["dtype"])
  _compare(path, arrays, expected)
  return arrays


def _with_elements(expected):
  """The arrays that are stored: those that are not empty."""
  return {
    name: {f: spec for f, spec in fields.items() if 0 not in spec["shape"]}
    for name, fields in expected.items()
  }


def _check_size(path, size, largest):
  found = directory_bytes(path)
  if not size <= found <= largest:
    raise CheckpointError(
      f"{path} holds {found} bytes; the metadata says {size}: the checkpoint"
      " is truncated or was altered"
    )


def _compare(path, stored, expected):
  if set(stored) != set(expected):
    difference = sorted(set(stored) ^ set(expected))
    raise CheckpointError(
      f"{path} and the metadata disagree about {', '.join(difference[:3])}"
    )
  for name, fields in expected.items():
    if set(stored[name]) != set(fields):
      raise CheckpointError(
        f"{path}: {name} is stored as {sorted(stored[name])}; the metadata"
        f" says {sorted(fields)}"
      )
    for field, spec in fields.items():
      array = stored[name][field]
      found = f"{np.dtype(array.dtype)}{list(array.shape)}"
      wanted = f"{spec['dtype']}{list(spec['shape'])}"
      if found != wanted:
        raise CheckpointError(
          f"{path}: {name}/{field} is stored as {found}; the metadata says"
          f" {wanted}: the checkpoint was altered"
        )
