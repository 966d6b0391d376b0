"""Weights that a GGUF file holds as E2M1 codes, kept bit for bit."""

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

Parts = tuple[UInt8[np.ndarray, "N C"], Float[np.ndarray, "N G"], float]
"""Codes, E4M3 scales of groups and the tensor's scale."""

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

# E4M3 holds 2^-9 to 2^8.
_EXPONENTS = 18
_LARGEST_EXPONENT = 8


def nvfp4_parts(stored: UInt8[np.ndarray, "N B"], scale: float) -> Parts:
  """From blocks of 64 elements: 4 scales, then 32 bytes of codes.

  Byte j of each 8 holds elements j and j + 8 of a group of 16.
  """
  rows = stored.shape[0]
  blocks = stored.reshape(rows, -1, 36)
  codes = _halves_to_pairs(blocks[..., 4:].reshape(rows, -1, 8))
  return codes, blocks[..., :4].reshape(rows, -1).view(_E4M3), scale


def mxfp4_parts(stored: UInt8[np.ndarray, "N B"], scale: float) -> Parts | None:
  """From blocks of 32 elements: an exponent, then 16 bytes of codes.

  Byte j holds elements j and j + 16. The power of two of a block becomes the
  scale of its two groups, divided by one of the whole tensor.

  Returns:
    None where the exponents lie too far apart for E4M3.
  """
  rows = stored.shape[0]
  blocks = stored.reshape(rows, -1, 17)
  exponents = blocks[..., 0].astype(np.int32) - 127
  codes = _halves_to_pairs(blocks[..., 1:])
  used = (blocks[..., 1:] & 0x77).any(axis=-1)
  if not used.any():
    return codes, np.ones((rows, 2 * blocks.shape[1]), _E4M3), scale
  largest = int(exponents[used].max())
  if largest - int(exponents[used].min()) >= _EXPONENTS or largest == 128:
    return None
  shift = largest - _LARGEST_EXPONENT
  scales = np.exp2(np.where(used, exponents - shift, 0).astype(np.float32))
  group_scale = np.repeat(scales, 2, axis=1).astype(_E4M3)
  return codes, group_scale, scale * 2.0**shift


def _halves_to_pairs(grouped):
  """From bytes of elements (j, j + n/2) to bytes of (2 j, 2 j + 1)."""
  elements = np.concatenate([grouped & 15, grouped >> 4], axis=-1)
  pairs = elements[..., 0::2] | (elements[..., 1::2] << 4)
  return pairs.reshape(grouped.shape[0], -1)
