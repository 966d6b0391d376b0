"""What quantizing does to a subgroup of activations, in terms of scalars.

These are the functions of `formats` as one thread of a kernel runs them
(`quantize.py`). On arrays, they are what the tests compare with
`quantize_rows`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from autoematic_jax import formats
from autoematic_jax.formats import scaling
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)


def largest_magnitude(*x: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """Largest magnitude; Inf where a value is NaN, which `max` might drop."""
  largest, zero = jnp.abs(x[0]), x[0] * 0.0
  for value in x[1:]:
    largest = jnp.maximum(largest, jnp.abs(value))
    zero = zero + value * 0.0
  return jnp.where(zero == 0.0, largest, jnp.inf)


def tensor_scale(amax: Float[Array, "*S"]) -> Float[Array, "*S"]:
  """Of a row by its largest magnitude; NaN where that is not finite."""
  return jnp.where(amax < jnp.inf, scaling.tensor_scale_of(amax), jnp.nan)


def quantized(
  x: Sequence[Float[Array, "*S"]],
  amax: Float[Array, "*S"],
  tensor_scale: Float[Array, "*S"],
  six: Bool[Array, "*S"] | None,
  config: ActivationConfig,
) -> list[Float[Array, "*S"]]:
  """Quantized values times their group's scale.

  Args:
    x: The four elements of a subgroup.
    amax: Largest magnitude of their group.
    tensor_scale: Of their row.
    six: Whether the row is at 6 bits; None where no row is.
    config: Threshold and step.
  """
  scale = scaling.group_scale_of(amax, tensor_scale)
  divisor = scale * tensor_scale
  scaled = [value / divisor for value in x]
  values = [formats.round_e2m1(value) for value in scaled]
  if six is not None:
    values = _refined(scaled, values, six, config)
  return [value * scale for value in values]


def _refined(scaled, near, six, config):
  error = _sum([jnp.square(s - n) for s, n in zip(scaled, near, strict=True)])
  norm = _sum([jnp.square(s) for s in scaled])
  refined = six & (error > config.threshold * norm)
  out = []
  for value, base in zip(scaled, near, strict=True):
    better, delta = formats.refine_to_6(
      value, base, config.decoding, nearest_base=config.nearest_base
    )
    out.append(jnp.where(refined, better + delta, base))
  return out


def _sum(values):
  """In the order of `ordered_sum`."""
  first, second, third, fourth = values
  return (first + third) + (second + fourth)
