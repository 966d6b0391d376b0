"""Names and structure of a converted checkpoint on disk."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autoematic_jax import formats

FORMAT_VERSION = 1
METADATA = "autoematic.json"
WEIGHTS = "weights"
REST = "rest"

FILES = frozenset(
  {
    METADATA,
    WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
  }
)
"""Everything that a checkpoint's directory may hold."""

DENSE_FORMATS = ("bf16", "fp32")
FORMATS = (*formats.LEVELS, *DENSE_FORMATS)

DEFAULT_LEVELS = {
  "nvfp4": (4,),
  "fp6g": (6,),
  "autofp6": (2, 4, 6),
  "autofp8": (2, 4, 6, 8),
  "bf16": (),
  "fp32": (),
}
"""Levels that a checkpoint of each format offers unless told otherwise."""

Tensor = formats.QTensor | jax.Array | np.ndarray
Arrays = dict[str, np.ndarray]


def layer_item(layer: int) -> str:
  """Name of the Orbax item that holds a layer."""
  return f"layer_{layer:05d}"


def layer_prefix(layer: int) -> str:
  """What the full names of a layer's tensors start with."""
  return f"model.layers.{layer}."


def outside_layers(name: str) -> bool:
  """Whether a tensor belongs to no layer, by its full name."""
  return not name.startswith("model.layers.")


def arrays_of(tensor: Tensor) -> Arrays:
  """The named arrays that a tensor is stored as."""
  if not isinstance(tensor, formats.QTensor):
    return {"values": np.asarray(tensor)}
  return tensor.arrays()


def describe(tensor: Tensor) -> dict[str, Any]:
  """A tensor's entry in the metadata."""
  arrays = {
    name: {"shape": list(array.shape), "dtype": str(array.dtype)}
    for name, array in arrays_of(tensor).items()
  }
  if not isinstance(tensor, formats.QTensor):
    return {"kind": "dense", "arrays": arrays}
  return {"kind": "quantized", **tensor.static(), "arrays": arrays}


def rebuild(entry: Mapping[str, Any], arrays: Arrays) -> Tensor:
  """The tensor that `describe` and `arrays_of` stand for."""
  if entry["kind"] == "dense":
    return arrays["values"]
  static = {name: entry[name] for name in ("format", "decoding", "columns")}
  return formats.QTensor.rebuild(arrays, static)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Bytes of a checkpoint's weights.

  Attributes:
    disk_bytes: Of all files under `weights/`.
    dense_bytes: Of the arrays of tensors that are not quantized.
    quantized_weights: Elements of the quantized matrices.
    dense_weights: Elements of the other tensors.
  """

  disk_bytes: int
  dense_bytes: int
  quantized_weights: int
  dense_weights: int

  @property
  def quantized_bytes(self) -> int:
    """Of everything but the dense arrays: what Orbax adds counts too."""
    return self.disk_bytes - self.dense_bytes

  @property
  def stored_bits(self) -> float:
    """Bits on disk for each quantized weight (each weight if none is)."""
    if not self.quantized_weights:
      return 8 * self.disk_bytes / self.dense_weights
    return 8 * self.quantized_bytes / self.quantized_weights


def directory_bytes(folder: Path) -> int:
  """Bytes of all files below a folder."""
  return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
