"""What a calibration has done so far, on disk, so that it can go on."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoematic_jax import formats
from autoematic_jax.errors import AutoematicError
from autoematic_jax.files import replacing

_SUBJECT = "subject.json"
_PROGRESS = "progress.npz"
_COUNTS = "refined.json"

Packed = dict[str, formats.QTensor]


class State:
  """A folder with the layers that are done and the hidden states after them.

  Args:
    folder: Made where it is missing; one of another calibration is refused.
    subject: What is calibrated, and how.

  Raises:
    AutoematicError: The folder belongs to another calibration.
  """

  def __init__(self, folder: Path, subject: Mapping[str, Any]):
    self._folder = folder
    text = json.dumps(subject, indent=2, sort_keys=True)
    known = folder / _SUBJECT
    if not known.exists():
      folder.mkdir(parents=True, exist_ok=True)
      with replacing(known) as path:
        path.write_text(text)
    elif known.read_text() != text:
      raise AutoematicError(
        f"{folder} holds an unfinished calibration of another kind; delete it,"
        " or repeat the command that began it"
      )

  def progress(self) -> tuple[int, dict[str, np.ndarray]]:
    """Layers that are done, and the hidden states after the last."""
    if not (self._folder / _PROGRESS).exists():
      return 0, {}
    with np.load(self._folder / _PROGRESS) as arrays:
      hidden = {name: arrays[name] for name in arrays.files if name != "done"}
      return int(arrays["done"]), hidden

  def counts(self) -> dict[str, int] | None:
    """Refined subgroups of each input, once they are kept."""
    path = self._folder / _COUNTS
    return json.loads(path.read_text()) if path.exists() else None

  def keep_counts(self, counts: Mapping[str, int]) -> None:
    """Keeps the refined subgroups of each input."""
    with replacing(self._folder / _COUNTS) as path:
      path.write_text(json.dumps(counts))

  def layer(self, number: int) -> Packed:
    """The packed tensors of a layer that is done."""
    with np.load(self._path(number)) as arrays:
      described = json.loads(str(arrays["tensors"]))
      return {
        name: _unpack(arrays, name, static)
        for name, static in described.items()
      }

  def add(
    self, number: int, packed: Packed, hidden: Mapping[str, np.ndarray]
  ) -> None:
    """Keeps one more layer; until this returns, the layer is not done."""
    described = {name: tensor.static() for name, tensor in packed.items()}
    arrays = {
      f"{name}/{field}": _as_bits(array)
      for name, tensor in packed.items()
      for field, array in tensor.arrays().items()
    }
    arrays["tensors"] = np.asarray(json.dumps(described))
    with replacing(self._path(number)) as path:
      _save(path, arrays)
    with replacing(self._folder / _PROGRESS) as path:
      _save(path, {"done": np.asarray(number + 1), **hidden})

  def discard(self) -> None:
    """Removes the folder."""
    shutil.rmtree(self._folder)

  def _path(self, number):
    return self._folder / f"layer_{number:05d}.npz"


def _save(path, arrays):
  np.savez(path, **arrays)


def _as_bits(array):
  """Numpy's files know no float8."""
  return array.view(np.uint8) if array.dtype == jnp.float8_e4m3fn else array


def _unpack(file, name, static) -> formats.QTensor:
  prefix = f"{name}/"
  arrays = {
    key.removeprefix(prefix): file[key]
    for key in file.files
    if key.startswith(prefix)
  }
  arrays["group_scale"] = arrays["group_scale"].view(jnp.float8_e4m3fn)
  return formats.QTensor.rebuild(arrays, static)
