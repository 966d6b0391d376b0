"""AutoFP2, AutoFP6 and AutoFP8 derived from an E2M1 base (paper 3.2).

An offset d counts steps from the base value; `fixed` steps are 1/8 (1/32 at 8
bits) everywhere, `exponent` steps grow with the base's exponent and so reach
its true E2M3 (E2M5) neighbours.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from autoematic_jax.formats.elements import E2M1_VALUES
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


def nearest_pair(
  scaled: Float[Array, "*S"], near: Float[Array, "*S"], decoding: Decoding
) -> tuple[Float[Array, "*S"], Int8[Array, "*S"]]:
  """Base and 2-bit offset whose sum is nearest, whichever base that takes.

  The offset reaches two steps one way and one the other, so an element that
  lies just short of half-way between two bases may be met better from the
  farther one. Its squared error is about 0.57 times that of `offset` beside
  the nearest base, and at 4 bits it would be larger.

  Args:
    scaled: Elements divided by their scale.
    near: Their nearest E2M1 value.
    decoding: Step.

  Returns:
    An E2M1 base, the nearest where both do as well, and d in [-2, 1].
  """
  far = _on_the_other_side(scaled, near)
  d_near, d_far = (offset(scaled, q, decoding) for q in (near, far))

  def error(d, q):
    return jnp.abs(scaled - q - offset_delta(d, q, decoding))

  better = error(d_far, far) < error(d_near, near)
  return jnp.where(better, far, near), jnp.where(better, d_far, d_near)


def refine_to_6(
  scaled: Float[Array, "*S"],
  near: Float[Array, "*S"],
  decoding: Decoding,
  *,
  nearest_base: bool,
) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
  """Base of each element at 6 bits, and what its offset adds to it.

  Args:
    scaled: Elements divided by their scale.
    near: Their nearest E2M1 value.
    decoding: Step.
    nearest_base: Whether that is the base, or the one from which the offset
      comes closest.
  """
  if nearest_base:
    base, d = near, offset(scaled, near, decoding)
  else:
    base, d = nearest_pair(scaled, near, decoding)
  return base, offset_delta(d, base, decoding)


def _on_the_other_side(scaled, near):
  """The E2M1 value that an element lies between, beside its nearest one."""
  magnitude = jnp.abs(near)
  above = 0.5 * exponent_e2m1(near)
  halved = (magnitude == 2) | (magnitude == 4)
  below = jnp.where(halved, 0.5 * above, above)
  outward = jnp.abs(scaled) > magnitude
  far = magnitude + jnp.where(outward, above, -below)
  far = jnp.clip(far, 0.0, E2M1_VALUES[-1])
  return jnp.where(far == 0, 0.0, jnp.copysign(far, scaled))


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
