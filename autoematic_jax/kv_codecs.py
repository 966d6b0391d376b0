"""How keys and values are packed, one codec a cache format.

Every group-scaled value, at whatever level, is an E2M5 number, so one byte
holds any of them and one decoder serves all: a request's tokens may sit at 4,
6 and 8 bits side by side in the same layer.
"""

import abc
import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import bfloat16
from autoematic_jax import formats
from autoematic_jax.arithmetic import exact_divide

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
  """`head_dim` rounded up to a whole number of groups."""
  return -(-head_dim // formats.GROUP) * formats.GROUP


def _pad(x, width):
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _to_bytes(value):
  """E2M5 numbers as `s e1 e0 m4 .. m0`: the upper bits of a float16."""
  half = lax.bitcast_convert_type(
    (value * 2.0**-14).astype(jnp.float16), jnp.uint16
  )
  return (((half >> 8) & 128) | ((half >> 5) & 127)).astype(jnp.uint8)


def _from_bytes(stored):
  """Undoes `_to_bytes`, but for a factor `2**-14`."""
  bits = stored.astype(jnp.uint16)
  bits = ((bits & 127) << 5) | ((bits & 128) << 8)
  return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _scale_bits(scale):
  """E4M3 bits; XLA's CPU copies float8 arrays element by element."""
  return lax.bitcast_convert_type(formats.encode_e4m3(scale), jnp.uint8)


def _scale_values(bits):
  stored = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
  return formats.decode_e4m3(stored)


def _group_scale(x, max_element):
  ones = jnp.ones((*x.shape[:-1], 1), jnp.float32)
  return formats.group_scale(x, ones, max_element)


def _divide(x, scale):
  return exact_divide(x, jnp.repeat(scale, formats.GROUP, axis=-1))


@dataclasses.dataclass(frozen=True)
class DenseCodec(Codec):
  """Keys and values as they are, in float32 or bfloat16."""

  dtype: str = "float32"

  def planes(self, head_dim):
    packed = self.dtype == "bfloat16"
    return {"values": (head_dim, jnp.uint16 if packed else jnp.float32)}

  def encode(self, x, levels):
    packed = self.dtype == "bfloat16"
    return {"values": bfloat16.pack(x) if packed else x.astype(jnp.float32)}

  def decode(self, planes, head_dim):
    return bfloat16.to_float32(planes["values"])


class GroupScaledCodec(Codec):
  """A byte an element and an E4M3 scale for each 16 of them."""

  def planes(self, head_dim):
    width = padded_dim(head_dim)
    return {
      "codes": (width, jnp.dtype(jnp.uint8)),
      "scales": (width // formats.GROUP, jnp.dtype(jnp.uint8)),
    }

  @abc.abstractmethod
  def quantize(
    self, x: Float[Array, "*B D"], levels: Int[Array, "*B"]
  ) -> tuple[Float[Array, "*B D"], Float[Array, "*B G"]]:
    """Unscaled E2M5 values, and the scale of each group."""

  def encode(self, x, levels):
    x = _pad(x.astype(jnp.float32), padded_dim(x.shape[-1]))
    value, scale = self.quantize(x, levels)
    return {"codes": _to_bytes(value), "scales": _scale_bits(scale)}

  def decode(self, planes, head_dim):
    # Behind the barrier a scale is decoded once, not once an element.
    scale = lax.optimization_barrier(_scale_values(planes["scales"]) * 2.0**14)
    value = _from_bytes(planes["codes"])
    grouped = value.reshape(*scale.shape, formats.GROUP) * scale[..., None]
    return grouped.reshape(value.shape)[..., :head_dim]


@dataclasses.dataclass(frozen=True)
class AutoFPCodec(GroupScaledCodec):
  """NVFP4 base, refined at 6 and 8 bits.

  `nearest_base` is that of `ActivationConfig`.

  At 8 bits the step is `exponent` whatever `decoding` says: a fixed step of
  1/32 beside 6.0 has more digits than a byte.
  """

  decoding: formats.Decoding = "exponent"
  nearest_base: bool = False

  def quantize(self, x, levels):
    scale = _group_scale(x, 6.0)
    scaled = _divide(x, scale)
    base = formats.round_e2m1(scaled)
    level = levels[..., None]
    base6, delta6 = formats.refine_to_6(
      scaled, base, self.decoding, nearest_base=self.nearest_base
    )
    value = jnp.where(level >= 6, base6 + delta6, base)
    offset8 = formats.offset8(scaled, base, "exponent")
    delta8 = formats.offset8_delta(offset8, base, "exponent")
    return jnp.where(level >= 8, base + delta8, value), scale


@dataclasses.dataclass(frozen=True)
class FP6gCodec(GroupScaledCodec):
  """Group-scaled E2M3."""

  def quantize(self, x, levels):
    scale = _group_scale(x, 7.5)
    return formats.round_e2m3(_divide(x, scale)), scale
