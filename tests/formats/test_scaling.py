import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats import numpy_reference as reference
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from autoematic_jax import formats

ROWS = npst.arrays(
  np.float32,
  (5, 48),
  elements=st.floats(-(2.0**40), 2.0**40, width=32)
  | st.floats(-4, 4, width=32)
  | st.just(0.0),
)


def scales(x, max_element=6.0):
  tensor = formats.row_tensor_scale(x, max_element)
  return tensor, formats.group_scale(x, tensor, max_element)


@pytest.mark.parametrize("largest", [6.0, 7.5])
def test_row_scale_maps_the_largest_magnitude_to_the_largest_value(
  run, largest
):
  x = jnp.array([[1.0, -3.0], [0.0, 0.0], [1e-20, 0.0], [2.0, 1e30]])
  actual = run(lambda x: formats.row_tensor_scale(x, largest), x)
  assert actual.shape == (4, 1)
  expected = np.float32([3, 1, 1e-20, 1e30]) / np.float32(largest * 448)
  expected[1] = 1
  np.testing.assert_array_equal(actual[:, 0], expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_scale_nan_and_no_other_has(run, bad):
  x = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
  clean = np.asarray(run(formats.row_tensor_scale, jnp.asarray(x)))
  x[1, 7] = bad
  actual = np.asarray(run(formats.row_tensor_scale, jnp.asarray(x)))
  assert np.isnan(actual[1])
  np.testing.assert_array_equal(actual[[0, 2]], clean[[0, 2]])


@given(ROWS)
def test_scales_are_positive_e4m3_values_and_a_row_is_its_own(x):
  tensor, group = (np.asarray(s) for s in jax.jit(scales)(x))
  assert (tensor > 0).all()
  assert np.isin(group, reference.E4M3[1:]).all()
  assert (group[~x.reshape(5, 3, 16).any(axis=2)] == 1).all()
  for row in range(5):
    alone = jax.jit(scales)(x[row : row + 1])
    np.testing.assert_array_equal(alone[0][0], tensor[row])
    np.testing.assert_array_equal(alone[1][0], group[row])


@pytest.mark.parametrize("largest", [6.0, 7.5])
def test_group_scales_agree_with_float64(run, largest):
  rng = np.random.default_rng(1)
  x = rng.standard_normal((40, 160)) * rng.lognormal(0, 3, (40, 160))
  x = x.astype(np.float32)
  tensor, group = run(lambda x: scales(x, largest), jnp.asarray(x))
  for row in range(len(x)):
    expected = reference.scales(np.float64(x[row : row + 1]), largest, 2.0**-9)
    np.testing.assert_array_equal(tensor[row, 0], expected[0])
    np.testing.assert_array_equal(group[row], expected[1][0])


def test_small_groups_keep_the_smallest_scale_and_empty_ones_have_one(run):
  x = np.zeros((1, 64), np.float32)
  x[0, 0], x[0, 16], x[0, 32] = 2688.0, 1e-3, 1e-30
  ones = jnp.ones((1, 1))
  group = run(formats.group_scale, jnp.asarray(x), ones)
  np.testing.assert_array_equal(group[0], [448, 2.0**-9, 2.0**-9, 1])
  group = run(
    lambda x, t: formats.group_scale(x, t, minimum=2.0**-4),
    jnp.asarray(x),
    ones,
  )
  np.testing.assert_array_equal(group[0], [448, 2.0**-4, 2.0**-4, 1])


def test_group_scale_saturates_and_carries_nan(run):
  x = np.ones((1, 32), np.float32)
  x[0, 0], x[0, 16] = 1e9, np.nan
  group = run(formats.group_scale, jnp.asarray(x), jnp.ones((1, 1)))
  assert group[0, 0] == 448
  assert np.isnan(group[0, 1])
