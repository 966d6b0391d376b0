import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from autoematic_jax import formats
from autoematic_jax.errors import QTensorError


def per_group(mask):
  return np.reshape(mask, (-1, 4)).sum(axis=1)


@given(
  npst.arrays(np.int64, 12, elements=st.integers(0, 20)),
  st.integers(0, 6),
)
def test_no_other_choice_gains_more(gain, budget):
  mask = formats.select_refinement_mask(gain.astype(np.float64), budget)
  assert mask.sum() == budget
  assert per_group(mask).max() <= 2
  best = max(
    gain[list(chosen)].sum()
    for chosen in itertools.combinations(range(12), budget)
    if max(np.bincount(np.array(chosen, int) // 4, minlength=3)) <= 2
  )
  assert gain[mask].sum() == best


def test_equal_gains_go_to_the_lower_index():
  mask = formats.select_refinement_mask(np.ones(12), 5)
  np.testing.assert_array_equal(np.flatnonzero(mask), [0, 1, 4, 5, 8])
  mask = formats.select_refinement_mask(np.zeros(8), 0)
  assert not mask.any()


def test_bound_of_a_group_is_a_choice():
  gain = np.array([9.0, 8, 7, 6, 1, 1, 1, 1])
  mask = formats.select_refinement_mask(gain, 4, max_per_group=4)
  np.testing.assert_array_equal(mask, [1, 1, 1, 1, 0, 0, 0, 0])
  mask = formats.select_refinement_mask(gain, 2, max_per_group=1)
  np.testing.assert_array_equal(np.flatnonzero(mask), [0, 4])


@pytest.mark.parametrize("budget", [-1, 5])
def test_a_budget_that_does_not_fit_is_refused(budget):
  with pytest.raises(QTensorError, match=f"budget={budget}.*2 in each of 2"):
    formats.select_refinement_mask(np.ones(8), budget)


@pytest.mark.parametrize(
  ("columns", "rho", "expected"),
  [
    (1024, 0.2, 51),
    (1280, 0.2, 64),
    (60, 0.2, 3),
    (16, 0.01, 1),
    (64, 0.5, 8),
    (64, 0.0, 0),
  ],
)
def test_budget(columns, rho, expected):
  assert formats.refinement_budget(columns, rho) == expected


@pytest.mark.parametrize("rho", [-0.1, 0.51, float("nan")])
def test_a_share_out_of_range_is_refused(rho):
  with pytest.raises(QTensorError, match=r"rho=.*\[0, 0.5\]"):
    formats.refinement_budget(64, rho)


@pytest.mark.parametrize("columns", [17, 36, 60])
def test_padding_is_refined_last(columns):
  """Real subgroups come first even where refining them gains nothing."""
  w = jnp.zeros((4, columns))
  q = formats.quantize_weight(w, format="autofp6", rho=0.2)
  assert q.refined >= 1
  assert int(formats.refined_columns(q)[-1]) < columns


def test_the_mask_of_a_tensor_is_that_of_most_gain():
  rng = np.random.default_rng(0)
  w = rng.standard_normal((32, 320)) * rng.lognormal(0, 1, 320)
  w = jnp.asarray(w, jnp.float32)
  gain = formats.refinement_gain(w, format="autofp6", decoding="exponent")
  expected = formats.select_refinement_mask(gain, 16)
  q = formats.quantize_weight(w, format="autofp6", rho=0.2)
  np.testing.assert_array_equal(formats.mask_bits(q), expected)
  squared = np.square(np.float64(formats.dequantize(q, 4)) - np.float64(w))
  refined = np.square(np.float64(formats.dequantize(q, 6)) - np.float64(w))
  saved = (squared - refined).sum()
  assert saved == pytest.approx(gain[expected].sum(), rel=1e-4)


def test_no_share_means_no_refinement():
  w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)))
  q = formats.quantize_weight(w, format="autofp6", rho=0.0)
  formats.validate_qtensor(q)
  assert q.refined == 0
  np.testing.assert_array_equal(
    formats.dequantize(q, 6), formats.dequantize(q, 4)
  )
