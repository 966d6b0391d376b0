"""How keys and values are packed, one codec a cache format.

Elements j and j + D/2 of a head share a byte (j in the low nibble), so that a
decoder splits a byte into two halves of a vector instead of interleaving.
"""

import abc
import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import formats

Planes = dict[str, Array]


class Codec(abc.ABC):
  """Packs vectors of one head, `[..., D]`, into planes and back."""

  @abc.abstractmethod
  def planes(self, head_dim: int) -> dict[str, tuple[int, jnp.dtype]]:
    """Width and dtype of each plane for one vector."""

  @abc.abstractmethod
  def encode(self, x: Float[Array, "*B D"], levels: Int[Array, "*B"]) -> Planes:
    """Packs vectors, each at its own level."""

  @abc.abstractmethod
  def decode(self, planes: Planes, head_dim: int) -> Float[Array, "*B D"]:
    """Unpacks vectors to float32."""


def padded_dim(head_dim: int) -> int:
  """`head_dim` rounded up to a whole number of pairs of groups."""
  return -(-head_dim // formats.GROUP) * formats.GROUP


def _pad(x, width):
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _join(codes):
  """Packs 4-bit codes, half a vector apart, two a byte."""
  low, high = jnp.split(codes.astype(jnp.uint8), 2, axis=-1)
  return low | (high << 4)


def _split(packed):
  """Undoes `_join`, to int32."""
  packed = packed.astype(jnp.int32)
  return jnp.concatenate([packed & 15, packed >> 4], axis=-1)


def _scale_bits(scale):
  """E4M3 bits; XLA's CPU copies float8 arrays element by element."""
  return lax.bitcast_convert_type(formats.encode_e4m3(scale), jnp.uint8)


def _expand_scale(bits):
  stored = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
  return jnp.repeat(formats.decode_e4m3(stored), formats.GROUP, axis=-1)


def _group_scale(x, max_element):
  ones = jnp.ones((*x.shape[:-1], 1), jnp.float32)
  return formats.group_scale(x, ones, max_element)


def _divide(x, scale):
  return formats.exact_divide(x, jnp.repeat(scale, formats.GROUP, axis=-1))


@dataclasses.dataclass(frozen=True)
class DenseCodec(Codec):
  """Keys and values as they are, in one floating dtype."""

  dtype: str = "float32"

  def planes(self, head_dim):
    return {"values": (head_dim, jnp.dtype(self.dtype))}

  def encode(self, x, levels):
    return {"values": x.astype(self.dtype)}

  def decode(self, planes, head_dim):
    return planes["values"].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class AutoFPCodec(Codec):
  """NVFP4 base with a 4-bit signed offset an element.

  The offset counts 1/32 of the element's step, so that 6-bit offsets are
  multiples of 4 and 4-bit vectors hold zeros: one decoder serves every level.
  """

  decoding: formats.Decoding = "exponent"

  def planes(self, head_dim):
    width = padded_dim(head_dim)
    return {
      "codes": (width // 2, jnp.dtype(jnp.uint8)),
      "offsets": (width // 2, jnp.dtype(jnp.uint8)),
      "scales": (width // formats.GROUP, jnp.dtype(jnp.uint8)),
    }

  def encode(self, x, levels):
    x = _pad(x.astype(jnp.float32), padded_dim(x.shape[-1]))
    scale = _group_scale(x, 6.0)
    scaled = _divide(x, scale)
    base = formats.round_e2m1(scaled)
    level = levels[..., None]
    offset = jnp.where(
      level >= 8,
      formats.offset8(scaled, base, self.decoding).astype(jnp.int32),
      4 * formats.offset(scaled, base, self.decoding).astype(jnp.int32),
    )
    offset = jnp.where(level >= 6, offset, 0)
    return {
      "codes": _join(formats.encode_e2m1(base)),
      "offsets": _join(offset & 15),
      "scales": _scale_bits(scale),
    }

  def decode(self, planes, head_dim):
    codes, offsets = planes["codes"], planes["offsets"]
    first, second = jnp.split(_expand_scale(planes["scales"]), 2, axis=-1)
    # The barrier keeps each half a loop of its own, which vectorizes; fused
    # into the concatenation it would branch at every element.
    halves = lax.optimization_barrier(
      (
        self._decode_half(codes & 15, offsets & 15) * first,
        self._decode_half(codes >> 4, offsets >> 4) * second,
      )
    )
    value = jnp.concatenate(halves, axis=-1)
    return value[..., :head_dim]

  def _decode_half(self, code, offset):
    """Values of nibbles: the base drops into the bits of a float16."""
    code = code.astype(jnp.uint16)
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    base = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    base = base * 2.0**14
    # Two's complement of 4 bits, in 1/32 of a step.
    steps = (offset.astype(jnp.int32) ^ 8) - 8
    return base + formats.offset8_delta(steps, base, self.decoding)


@dataclasses.dataclass(frozen=True)
class FP6gCodec(Codec):
  """Group-scaled E2M3: the upper and lower bits in planes of their own."""

  def planes(self, head_dim):
    width = padded_dim(head_dim)
    return {
      "codes": (width // 2, jnp.dtype(jnp.uint8)),
      "mantissas": (width // 2, jnp.dtype(jnp.uint8)),
      "scales": (width // formats.GROUP, jnp.dtype(jnp.uint8)),
    }

  def encode(self, x, levels):
    x = _pad(x.astype(jnp.float32), padded_dim(x.shape[-1]))
    scale = _group_scale(x, 7.5)
    value = formats.round_e2m3(_divide(x, scale))
    code = formats.encode_e2m3(value)
    return {
      "codes": _join(code >> 2),
      "mantissas": _join(code & 3),
      "scales": _scale_bits(scale),
    }

  def decode(self, planes, head_dim):
    upper, lower = _split(planes["codes"]), _split(planes["mantissas"])
    code = ((upper << 2) | lower).astype(jnp.uint8)
    value = formats.decode_e2m3(code)
    scale = _expand_scale(planes["scales"])
    return (value * scale)[..., :head_dim]
