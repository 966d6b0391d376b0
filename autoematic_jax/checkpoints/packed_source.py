"""Hugging Face folders with NVFP4 weights."""

from pathlib import Path

import numpy as np

from autoematic_jax import formats
from autoematic_jax.checkpoints import packed_weights
from autoematic_jax.checkpoints.quantization_config import PackedLayout
from autoematic_jax.checkpoints.safetensors_source import SafetensorsSource
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.errors import CheckpointError

# Scales of a cache in FP8. Ours has its own.
_CACHE_SCALES = ("k_scale", "v_scale")


class PackedSource(Source):
  """A folder of which some weights are packed.

  Its weights have their usual names; scales are not listed. Scales of inputs
  are not used, since activations are scaled token by token.

  Args:
    folder: The folder.
    layout: What its config says.

  Raises:
    CheckpointError: A file is missing or damaged, or the tensors are not those
      that the config describes.
  """

  def __init__(self, folder: Path, layout: PackedLayout):
    self._files = SafetensorsSource(folder)
    self._layout = layout
    self.config = {
      name: value
      for name, value in self._files.config.items()
      if name != "quantization_config"
    }
    self.description = f"{layout.producer} folder {folder.resolve().name}"
    self._packed = self._packed_modules()
    self._check_modules()
    self._check_input_scales()
    hidden = {
      f"{module}.{part}"
      for module in self._packed
      for part in (
        layout.codes,
        layout.group_scale,
        layout.tensor_scale,
        layout.input_scale,
      )
    }
    self._names = {f"{module}.weight" for module in self._packed} | {
      name
      for name in self._files.names - hidden
      if name.rpartition(".")[2] not in _CACHE_SCALES
    }

  def _packed_modules(self):
    suffix = f".{self._layout.codes}"
    return {
      name.removesuffix(suffix)
      for name in self._files.names
      if name.endswith(suffix) and self._files.stored_dtype(name) == "U8"
    }

  def _check_modules(self):
    """Compares what is packed with what the config says is."""
    layout, names = self._layout, self._files.names
    for name in sorted(names):
      if self._files.stored_dtype(name).startswith("F8") and not (
        name.endswith(f".{layout.group_scale}")
        and name.removesuffix(f".{layout.group_scale}") in self._packed
      ):
        raise CheckpointError(
          f"{name} is {self._files.stored_dtype(name)}, and no scale of a 4-bit"
          " weight: FP8 weights are not handled"
        )
      if name.endswith(".pre_quant_scale"):
        raise CheckpointError(
          f"{name}: inputs that are scaled first (AWQ) are not handled"
        )
    for module in sorted(self._packed):
      if not layout.packed(module):
        raise CheckpointError(
          f"{module} is packed, and the quantization config leaves it out"
        )
      for part in (layout.group_scale, layout.tensor_scale):
        if f"{module}.{part}" not in names:
          raise CheckpointError(f"{self.description} lacks {module}.{part}")

  def _check_input_scales(self):
    part = self._layout.input_scale
    lacking = sorted(
      module
      for module in self._packed
      if f"{module}.{part}" not in self._files.names
    )
    if lacking and len(lacking) < len(self._packed):
      raise CheckpointError(
        f"{len(lacking)} of {len(self._packed)} packed weights lack"
        f" {part}, which the others have: {', '.join(lacking[:3])}; the folder"
        " was not calibrated wholly"
      )

  @property
  def names(self) -> set[str]:
    return self._names

  def _is_packed(self, name):
    return name.removesuffix(".weight") in self._packed

  def shape(self, name: str) -> tuple[int, ...]:
    if not self._is_packed(name):
      return self._files.shape(name)
    rows, width = self._files.shape(self._part(name, self._layout.codes))
    return rows, 2 * width

  def dtype(self, name: str) -> np.dtype:
    if self._is_packed(name):
      return np.dtype(np.float32)
    return self._files.dtype(name)

  def read(self, name: str) -> np.ndarray:
    tensor = self.packed(name)
    if tensor is None:
      return self._files.read(name)
    return np.asarray(formats.dequantize(tensor))

  def packed(self, name: str) -> formats.QTensor | None:
    if not self._is_packed(name):
      return None
    layout = self._layout
    scale = self._files.raw(self._part(name, layout.tensor_scale))
    if scale.size != 1 or scale.dtype != np.float32:
      raise CheckpointError(
        f"{self._part(name, layout.tensor_scale)} is"
        f" {scale.dtype}{list(scale.shape)}; it must be one float32"
      )
    value = np.float32(scale.reshape(()))
    if layout.reciprocal:
      with np.errstate(divide="ignore", over="ignore"):
        value = np.float32(1) / value
    return packed_weights.nvfp4(
      name,
      self._files.raw(self._part(name, layout.codes)),
      self._files.raw(self._part(name, layout.group_scale)),
      float(value),
    )

  def _part(self, name, part):
    return f"{name.removesuffix('.weight')}.{part}"

  def tokenizer_files(self) -> dict[str, bytes]:
    return self._files.tokenizer_files()
