"""What packing does to four elements of a key or value, in terms of scalars.

These are the functions of `kv_codecs.AutoFPCodec` as one thread of a kernel
runs them (`prepare_sm90.py`). On arrays, they are what the tests compare with
the codec.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax import formats
from autoematic_jax.formats import scaling
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)


def packed(
  x: Sequence[Float[Array, "*S"]],
  amax: Float[Array, "*S"],
  six: Bool[Array, "*S"],
  config: ActivationConfig,
) -> tuple[Int[Array, "*S"], Int[Array, "*S"]]:
  """Four E2M5 bytes as a word, and the E4M3 byte of their scale.

  Args:
    x: Elements of a group.
    amax: Largest magnitude of the whole group.
    six: Whether they are refined, to 6 bits.
    config: Step of the offsets.
  """
  scale = scaling.group_scale_of(amax, jnp.ones_like(amax))
  word = jnp.zeros_like(six, jnp.int32)
  for n, value in enumerate(x):
    byte = _byte(_element(value / scale, six, config))
    word = word | jnp.left_shift(byte, 8 * n)
  return word, _scale_byte(scale)


def _element(scaled, six, config):
  near = formats.round_e2m1(scaled)
  base, delta = formats.refine_to_6(
    scaled, near, config.decoding, nearest_base=config.nearest_base
  )
  return jnp.where(six, base + delta, near)


def _byte(value):
  """An E2M5 number as `s e1 e0 m4 .. m0`."""
  # In steps of 1/32; twice and four times as many above 2 and 4.
  steps = (jnp.abs(value) * 32.0).astype(jnp.int32)
  upper = jnp.where(steps < 128, 32 + (steps >> 1), 64 + (steps >> 2))
  byte = jnp.where(steps < 64, steps, upper)
  # By its bits: -0.0 keeps its sign.
  sign = lax.bitcast_convert_type(value, jnp.int32) < 0
  return byte | jnp.where(sign, 128, 0)


def _scale_byte(scale):
  """A positive E4M3 number's bits; NaN where it is NaN."""
  bits = lax.bitcast_convert_type(scale, jnp.int32) >> 20
  # float32 keeps 8 exponent bits, of a bias that is greater by 120.
  small = (scale * 512.0).astype(jnp.int32)
  byte = jnp.where(scale < 2.0**-6, small, bits - (120 << 3))
  return jnp.where(scale == scale, byte, 127)
