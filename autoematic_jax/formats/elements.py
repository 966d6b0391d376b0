"""E2M1, E2M3 and E4M3 by arithmetic on float32.

XLA may drop a cast to an 8- or 4-bit float and back as a pair without effect,
so nothing here relies on such casts to round.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _power_of_two(exponent):
  """`2**exponent` for int32 exponents in the normal range."""
  return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _round_float(x, *, mantissa_bits, min_exponent, largest):
  """Nearest value, ties to even, with subnormals, saturating; NaN stays."""
  magnitude = jnp.abs(x)
  bits = lax.bitcast_convert_type(magnitude, jnp.int32)
  exponent = jnp.maximum((bits >> 23) - 127, min_exponent)
  exponent = jnp.minimum(exponent, 120)
  step = _power_of_two(exponent - mantissa_bits)
  inverse = _power_of_two(mantissa_bits - exponent)
  rounded = jnp.minimum(jnp.round(magnitude * inverse) * step, largest)
  rounded = jnp.where(jnp.isnan(x), jnp.nan, rounded)
  return jnp.copysign(rounded, x)


def round_e2m1(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """Nearest E2M1 value, ties to the even code, saturating at 6; no -0."""
  rounded = _round_float(
    x.astype(jnp.float32), mantissa_bits=1, min_exponent=0, largest=6.0
  )
  return jnp.where(rounded == 0, 0.0, rounded)


def round_e2m3(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """Nearest E2M3 value, ties to the even code, saturating at 7.5; no -0."""
  rounded = _round_float(
    x.astype(jnp.float32), mantissa_bits=3, min_exponent=0, largest=7.5
  )
  return jnp.where(rounded == 0, 0.0, rounded)


def round_e4m3(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """Nearest E4M3 value, ties to the even code, saturating at 448.

  The sign of zero is kept, and NaN stays NaN.
  """
  return _round_float(
    x.astype(jnp.float32), mantissa_bits=3, min_exponent=-6, largest=448.0
  )


def exponent_e2m1(q: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """`2**e` of an E2M1 value: 1 below 2, 2 at 2 and 3, 4 at 4 and 6."""
  magnitude = jnp.abs(q)
  return jnp.where(
    magnitude >= 4, 4.0, jnp.where(magnitude >= 2, 2.0, 1.0)
  ).astype(jnp.float32)


def encode_e2m1(values: Float[Array, "*S"]) -> UInt8[Array, "*S"]:
  """4-bit codes `s e1 e0 m` of E2M1 values; -0 keeps its sign bit."""
  values = values.astype(jnp.float32)
  magnitude = jnp.abs(values)
  code = sum(
    (magnitude >= value).astype(jnp.uint8) for value in E2M1_VALUES[1:]
  )
  return code | (jnp.signbit(values).astype(jnp.uint8) << 3)


def decode_e2m1(codes: UInt8[Array, "*S"]) -> Float[Array, "*S"]:
  """Values of 4-bit codes."""
  codes = codes.astype(jnp.int32)
  exponent = (codes >> 1) & 3
  mantissa = codes & 1
  halves = jnp.where(
    exponent > 0, (2 + mantissa) << jnp.maximum(exponent - 1, 0), mantissa
  )
  value = halves.astype(jnp.float32) * 0.5
  return jnp.where(codes >= 8, -value, value)


def encode_e2m3(values: Float[Array, "*S"]) -> UInt8[Array, "*S"]:
  """6-bit codes `s e1 e0 m2 m1 m0` of E2M3 values."""
  values = values.astype(jnp.float32)
  eighths = jnp.abs(values * 8).astype(jnp.int32)
  exponent = sum((eighths >= edge).astype(jnp.int32) for edge in (8, 16, 32))
  mantissa = (eighths >> jnp.maximum(exponent - 1, 0)) & 7
  sign = jnp.signbit(values).astype(jnp.int32)
  return ((sign << 5) | (exponent << 3) | mantissa).astype(jnp.uint8)


def decode_e2m3(codes: UInt8[Array, "*S"]) -> Float[Array, "*S"]:
  """Values of 6-bit codes."""
  codes = codes.astype(jnp.int32)
  exponent = (codes >> 3) & 3
  mantissa = codes & 7
  eighths = jnp.where(
    exponent > 0, (8 + mantissa) << jnp.maximum(exponent - 1, 0), mantissa
  )
  value = eighths.astype(jnp.float32) * 0.125
  return jnp.where(codes >= 32, -value, value)


def encode_e4m3(values: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """E4M3 values stored as float8_e4m3fn; the cast is exact."""
  return values.astype(jnp.float8_e4m3fn)


def decode_e4m3(stored: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """float8_e4m3fn to float32, from its bits.

  The bits keep XLA from folding this with the cast that stored the value.
  """
  bits = lax.bitcast_convert_type(stored, jnp.uint8).astype(jnp.int32)
  exponent = (bits >> 3) & 15
  mantissa = bits & 7
  significand = jnp.where(exponent > 0, 8 + mantissa, mantissa)
  scale = _power_of_two(jnp.maximum(exponent, 1) - 10)
  value = significand.astype(jnp.float32) * scale
  value = jnp.where((bits & 127) == 127, jnp.nan, value)
  return jnp.where(bits >= 128, -value, value)
