"""AutoFP2, AutoFP6 and AutoFP8 derived from an E2M1 base (paper 3.2).

An offset d counts steps from the base value; `fixed` steps are 1/8 (1/32 at 8
bits) everywhere, `exponent` steps grow with the base's exponent and so reach
its true E2M3 (E2M5) neighbours.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from autoematic_jax.formats.elements import exponent_e2m1

Decoding = Literal["fixed", "exponent"]

AUTOFP2_SCALE = 2.0
"""The constant c of AutoFP2: levels are 0, +-2 and +-4 (paper section 5)."""


def autofp2_digit(q: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """Signed digit in {0, +-1, +-2} of an E2M1 value.

  Its magnitude is `{e1 & e0, e1 ^ e0}` of the code's exponent bits.
  """
  magnitude = jnp.abs(q)
  digit = (magnitude >= 1).astype(jnp.float32) + (magnitude >= 4)
  return jnp.where(q < 0, -digit, digit)


def _step(q, decoding, divisions):
  if decoding == "fixed":
    return jnp.full_like(q, 1.0 / divisions)
  return exponent_e2m1(q) * (1.0 / divisions)


def _nearest_offset(scaled, q, decoding, divisions, lowest, highest):
  """Nearest count of steps; a tie goes to the smaller magnitude."""
  distance = (scaled - q) / _step(q, decoding, divisions)
  toward_zero = jnp.sign(distance) * jnp.ceil(jnp.abs(distance) - 0.5)
  return jnp.clip(toward_zero, lowest, highest).astype(jnp.int8)


def offset(
  scaled: Float[Array, "*S"], q: Float[Array, "*S"], decoding: Decoding
) -> Int8[Array, "*S"]:
  """2-bit offset of an element from its base.

  Args:
    scaled: Elements divided by their scale.
    q: Their E2M1 base.
    decoding: Step.

  Returns:
    d in [-2, 1].
  """
  return _nearest_offset(scaled, q, decoding, 8, -2, 1)


def offset_delta(
  d: Int[Array, "*S"], q: Float[Array, "*S"], decoding: Decoding
) -> Float[Array, "*S"]:
  """Refinement `d * step` of a 2-bit offset."""
  return d.astype(jnp.float32) * _step(q, decoding, 8)


def offset8(
  scaled: Float[Array, "*S"], q: Float[Array, "*S"], decoding: Decoding
) -> Int8[Array, "*S"]:
  """4-bit offset, in [-8, 7] quarter steps (paper Table 10)."""
  return _nearest_offset(scaled, q, decoding, 32, -8, 7)


def offset8_delta(
  d: Int[Array, "*S"], q: Float[Array, "*S"], decoding: Decoding
) -> Float[Array, "*S"]:
  """Refinement of a 4-bit offset."""
  return d.astype(jnp.float32) * _step(q, decoding, 32)


def offset8_to_offset6(d: Int[Array, "*S"]) -> Int[Array, "*S"]:
  """The 2-bit offset that the 6-bit level of an AutoFP8 tensor decodes."""
  return jnp.clip((d + 2) >> 2, -2, 1)


def split_offset8(
  d: Int[Array, "*S"],
) -> tuple[Int[Array, "*S"], Int[Array, "*S"]]:
  """`(d1, d0)` with `d = 4 * d1 + d0`, d1 in [-2, 1] and d0 in [0, 3]."""
  return d >> 2, d & 3
