"""Sums and quotients that must not know the shape around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax import arithmetic


def numbers(*shape):
  rng = np.random.default_rng(shape)
  return rng.standard_normal(shape).astype(np.float32)


def folded(row):
  """The documented order, one float32 addition at a time."""
  row = list(row)
  while len(row) > 1:
    half = 1 << (len(row) - 1).bit_length() - 1
    for i, value in enumerate(row[half:]):
      row[i] = row[i] + value
    row = row[:half]
  return row[0]


@pytest.mark.parametrize("jit", [True, False])
def test_division_by_a_broadcast_scale_is_correctly_rounded(jit):
  divide = jax.jit(arithmetic.exact_divide) if jit else arithmetic.exact_divide
  x = numbers(7, 96)
  rng = np.random.default_rng(0)
  for shape in ((7, 1), (1, 96), (7, 96), ()):
    divisor = rng.uniform(0.1, 9, shape).astype(np.float32)
    actual = divide(jnp.asarray(x), jnp.asarray(divisor))
    np.testing.assert_array_equal(actual, x / divisor)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 48, 64, 97, 576, 1000])
def test_sum_is_taken_in_the_documented_order(count):
  total = jax.jit(arithmetic.ordered_sum)
  for rows in (1, 5, 64, 320):
    x = numbers(rows, count)
    expected = [folded(row) if count else 0.0 for row in x]
    np.testing.assert_array_equal(total(x), np.float32(expected))


def test_zeros_behind_a_row_leave_its_sum_alone():
  x = numbers(5, 48)
  total = jax.jit(arithmetic.ordered_sum)
  for count in (49, 64, 96, 200):
    padded = np.pad(x, ((0, 0), (0, count - 48)))
    np.testing.assert_array_equal(total(padded), total(x))


@pytest.mark.parametrize("count", [0, 1, 5, 64, 1000])
def test_max_is_that_of_numpy(count):
  x = numbers(4, count)
  x[1, count // 2 :] = -np.inf
  x[2, -1:] = np.nan
  expected = x.max(1, initial=-np.inf)
  actual = jax.jit(arithmetic.ordered_max)(x)
  np.testing.assert_array_equal(actual, expected)


def test_softmax_is_that_of_float64_and_of_each_row_alone():
  x = 4 * numbers(33, 1000)
  x[:, 7] = -np.inf
  together = np.asarray(jax.jit(arithmetic.softmax)(x))
  weights = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
  expected = weights / weights.sum(1, keepdims=True)
  np.testing.assert_allclose(together, expected, rtol=1e-5, atol=1e-12)
  alone = [jax.jit(arithmetic.softmax)(x[i : i + 1])[0] for i in range(33)]
  np.testing.assert_array_equal(together, alone)
  assert np.isnan(arithmetic.softmax(jnp.full((1, 4), jnp.nan))).all()
