"""Arithmetic whose bits do not depend on the shape of what stands around it.

Compilers reorder sums and replace divisions where a shape makes it worth while,
so that a row's result would change with the size of its batch.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def exact_divide(
  x: Float[Array, "*S"], divisor: Float[Array, "..."]
) -> Float[Array, "*S"]:
  """`x / divisor`, correctly rounded, the divisor broadcast to x.

  XLA replaces a division by a broadcast value with a product by its rounded
  reciprocal, which misses the last bit of a fifth of the quotients, and does so
  for some shapes only. The barrier hides the broadcast.
  """
  divisor = jnp.broadcast_to(divisor, x.shape)
  return x / lax.optimization_barrier(divisor)


def ordered_sum(x: Float[Array, "*B N"]) -> Float[Array, "*B"]:
  """Sum over the last axis in an order that only an element's index decides.

  XLA's CPU backend lets the order of a reduction change with the size of the
  whole array; additions that are spelt out stay as they are. Halves are folded
  onto each other, from the largest power of two down, so zeros appended to a
  row do not change its sum either. On a GPU, where the folds would be kernels
  of their own, the order is XLA's.
  """
  return _reduce(jnp.add, jnp.sum, x, 0.0)


def ordered_max(x: Float[Array, "*B N"]) -> Float[Array, "*B"]:
  """Largest value over the last axis, by the folds of `ordered_sum`.

  A maximum has no order, but XLA's CPU backend fuses a reduction with the
  elementwise operations around it, for some shapes only, and gives them another
  exponential there.
  """
  return _reduce(jnp.maximum, jnp.max, x, -jnp.inf)


def _reduce(combine, reduce, x, identity):
  return lax.platform_dependent(
    x,
    cpu=lambda x: _fold(combine, x, identity),
    default=lambda x: reduce(x, axis=-1, initial=identity),
  )


def _fold(combine, x, identity):
  if x.shape[-1] == 0:
    return jnp.full(x.shape[:-1], identity, x.dtype)
  while (count := x.shape[-1]) > 1:
    half = 1 << (count - 1).bit_length() - 1
    first, second = jnp.split(x, [half], axis=-1)
    missing = [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - count)]
    x = combine(first, jnp.pad(second, missing, constant_values=identity))
  return x[..., 0]


def softmax(x: Float[Array, "*B N"]) -> Float[Array, "*B N"]:
  """Softmax over the last axis; NaN gives NaN.

  A row that holds no finite value gives NaN.
  """
  weights = jnp.exp(x - ordered_max(x)[..., None])
  return exact_divide(weights, ordered_sum(weights)[..., None])
