"""Tensor and group scales shared by the group-scaled formats."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from autoematic_jax.arithmetic import exact_divide
from autoematic_jax.formats.elements import round_e4m3
from autoematic_jax.formats.packing import GROUP

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-9
"""Smallest positive E4M3 value."""

SMALLEST_WEIGHT_SCALE = 2.0**-4
"""A quarter of any E4M3 scale from here on is exact in E4M3."""

_SMALLEST_TENSOR_SCALE = 2.0**-100


def tensor_scale(
  x: Float[Array, "*S"], max_element: float = 6.0
) -> Float[Array, ""]:
  """`amax / (max_element * 448)` of a whole tensor; 1 when it is all zero."""
  return tensor_scale_of(jnp.max(jnp.abs(x)), max_element)


def row_tensor_scale(
  x: Float[Array, "*B K"], max_element: float = 6.0
) -> Float[Array, "*B 1"]:
  """The same for each row; NaN for a row that holds NaN or Inf.

  One scale a row, rather than a batch, keeps a request's result its own.
  """
  amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
  finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
  return jnp.where(finite, tensor_scale_of(amax, max_element), jnp.nan)


def tensor_scale_of(
  amax: Float[Array, "*S"], max_element: float = 6.0
) -> Float[Array, "*S"]:
  """Scale of what has this largest magnitude; 1 where that is 0."""
  largest = jnp.float32(max_element * E4M3_MAX)
  scale = exact_divide(amax.astype(jnp.float32), largest)
  # Below this float32 would lose bits to subnormals, or reach 0.
  return jnp.where(amax == 0, 1.0, jnp.maximum(scale, _SMALLEST_TENSOR_SCALE))


def group_scale(
  x: Float[Array, "*B K"],
  tensor_scale: Float[Array, "..."],
  max_element: float | Float[Array, ""] = 6.0,
  minimum: float = SMALLEST_SCALE,
) -> Float[Array, "*B G"]:
  """Decoded E4M3 scale of each group of 16 along the last axis.

  Args:
    x: K is a multiple of 16.
    tensor_scale: Broadcasts against `[..., 1]`.
    max_element: Element value that the largest magnitude maps to.
    minimum: Scales below are raised to it.

  Returns:
    Positive E4M3 values; 1 for an all-zero group.
  """
  groups = x.reshape(*x.shape[:-1], -1, GROUP)
  amax = jnp.max(jnp.abs(groups), axis=-1)
  return group_scale_of(amax, tensor_scale, max_element, minimum)


def group_scale_of(
  amax: Float[Array, "*S"],
  tensor_scale: Float[Array, "..."],
  max_element: float | Float[Array, ""] = 6.0,
  minimum: float = SMALLEST_SCALE,
) -> Float[Array, "*S"]:
  """`group_scale` of groups with these largest magnitudes."""
  scale = round_e4m3(exact_divide(amax, max_element * tensor_scale))
  return jnp.where(amax == 0, 1.0, jnp.maximum(scale, minimum))
