"""NVFP4 weights that somebody else packed, kept bit for bit."""

import dataclasses

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from autoematic_jax import formats
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PrecisionError

FORMATS = ("autofp6", "nvfp4")
"""Formats that keep a given base."""

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_SMALLEST = float(np.finfo(np.float32).tiny)

# Its largest weight would be 2688; those of real models are below 100.
_LARGEST_TENSOR_SCALE = 1.0


def nvfp4(
  name: str,
  codes: UInt8[np.ndarray, "N C"],
  group_scale: Float[np.ndarray, "N G"],
  tensor_scale: float,
) -> formats.QTensor:
  """A tensor from codes and scales as they were found.

  Scales of 0 become 1 in groups that hold nothing but 0, the values of which
  stay as they are; subnormal group scales are exact and are kept.

  Args:
    name: For messages.
    codes: E2M1, the even column in the low nibble.
    group_scale: E4M3, for each 16 columns.
    tensor_scale: What all is multiplied by.

  Returns:
    An `nvfp4` tensor.

  Raises:
    CheckpointError: Shapes or dtypes do not fit, or a scale is not finite, not
      above 0 or is implausible.
  """
  rows, width = codes.shape
  groups = (rows, 2 * width // formats.GROUP)
  if 2 * width % formats.GROUP or group_scale.shape != groups:
    raise CheckpointError(
      f"{name}: codes {list(codes.shape)} need E4M3 scales {list(groups)}, one"
      f" for each {formats.GROUP} columns; there are {list(group_scale.shape)}"
    )
  if group_scale.dtype != _E4M3:
    raise CheckpointError(
      f"{name}: its group scales are {group_scale.dtype}, not float8_e4m3fn"
    )
  _check_tensor_scale(name, tensor_scale)
  values = group_scale.astype(np.float32)
  empty = ~(codes.reshape(*groups, -1) & 0x77).any(axis=-1)
  bad = ~(np.isfinite(values) & (values > 0)) & ~(empty & (values == 0))
  if bad.any():
    row, group = np.argwhere(bad)[0].tolist()
    raise CheckpointError(
      f"{name}: {int(bad.sum())} of {bad.size} group scales are not finite and"
      f" above 0, first {values[row, group]} of row {row}, group {group}"
    )
  kept = np.where(values == 0, _E4M3.type(1), group_scale)
  return formats.QTensor.rebuild(
    {
      "codes": np.ascontiguousarray(codes),
      "group_scale": np.ascontiguousarray(kept),
      "tensor_scale": np.asarray(tensor_scale, np.float32),
    },
    {"format": "nvfp4", "decoding": "exponent", "columns": 2 * width},
  )


def _check_tensor_scale(name, scale):
  if not (np.isfinite(scale) and scale >= _SMALLEST):
    raise CheckpointError(
      f"{name}: tensor scale {scale} is not a finite, normal float32 above 0"
    )
  if scale > _LARGEST_TENSOR_SCALE:
    raise CheckpointError(
      f"{name}: tensor scale {scale:g} would make weights of up to"
      f" {scale * 2688:.3g}; the file seems to hold the reciprocal of what its"
      " format says (ModelOpt: amax / 2688, compressed-tensors: 2688 / amax)"
    )


def in_format(
  tensor: formats.QTensor, format: str, decoding: formats.Decoding
) -> formats.QTensor:
  """A given base in a format of ours, without offsets.

  Args:
    tensor: An `nvfp4` tensor.
    format: One of FORMATS.
    decoding: Step that activations are refined with.

  Returns:
    The same codes and scales; `autofp6` refines no subgroup of them.

  Raises:
    PrecisionError: The format would round the weights once more.
  """
  if format not in FORMATS:
    raise PrecisionError(
      f"weights that are NVFP4 already cannot become {format}; choose from"
      f" {', '.join((*FORMATS, 'bf16', 'fp32'))}"
    )
  tensor = dataclasses.replace(tensor, decoding=decoding)
  if format == "nvfp4":
    return tensor
  groups = tensor.group_scale.shape[-1]
  none = {
    "refinement_mask": np.zeros(-(-groups // 2), np.uint8),
    "offsets": np.zeros((tensor.rows, 0), np.uint8),
  }
  static = {**tensor.static(), "format": format}
  return formats.QTensor.rebuild({**tensor.arrays(), **none}, static)
