"""Where refined subgroups go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoematic_jax import formats
from autoematic_jax.calibration import budget
from autoematic_jax.errors import QTensorError


def inputs(seed, shapes):
  rng = np.random.default_rng(seed)
  return {
    index: budget.Candidates(np.exp(3 * rng.standard_normal(4 * groups)), rows)
    for index, (groups, rows) in enumerate(shapes)
  }


def offsets(counts, candidates):
  return sum(n * candidates[key].rows for key, n in counts.items())


shapes = st.lists(
  st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=5
)


@given(st.integers(0, 99), shapes, st.sampled_from([0.0, 0.1, 0.2, 0.5]))
def test_it_stays_inside_its_budget(seed, shapes, rho):
  candidates = inputs(seed, shapes)
  counts = budget.spend(candidates, rho)
  even = {
    key: formats.refinement_budget(4 * c.gain.size, rho)
    for key, c in candidates.items()
  }
  assert offsets(counts, candidates) <= offsets(even, candidates)
  for key, c in candidates.items():
    # A mask of that size exists.
    assert (
      formats.select_refinement_mask(c.gain, counts[key]).sum() == (counts[key])
    )
    assert counts[key] >= (rho > 0)


def test_it_leaves_less_than_an_even_share():
  candidates = inputs(1, [(20, 8), (20, 32), (20, 8)])
  # One input on which much depends.
  candidates[0].gain[:] *= 10
  spread = budget.spend(candidates, 0.2)
  even = dict.fromkeys(candidates, formats.refinement_budget(320, 0.2))

  def left(counts):
    return sum(
      c.gain[~formats.select_refinement_mask(c.gain, counts[key])].sum()
      for key, c in candidates.items()
    )

  assert left(spread) < 0.8 * left(even)


def test_what_saves_nothing_is_not_refined():
  lost = budget.Candidates(np.full(40, -1.0), 8)
  gained = budget.Candidates(np.full(40, 1.0), 8)
  assert budget.spend({"lost": lost, "gained": gained}, 0.2) == {
    "lost": 1,
    "gained": 15,
  }


def test_a_share_out_of_range_is_refused():
  with pytest.raises(QTensorError, match=r"rho=0\.6 must be in"):
    budget.spend(inputs(0, [(4, 4)]), 0.6)


def test_gains_are_those_of_all_readers():
  rng = np.random.default_rng(2)
  w = rng.standard_normal((12, 20)).astype(np.float32)
  squares = rng.random(20)
  gradients = np.repeat([2.0, 6.0], [8, 4])
  options = {"format": "autofp6", "decoding": "exponent"}
  found = budget.candidates(
    [w[:8], w[8:]],
    gradients=gradients,
    inputs=squares,
    activation_gain=None,
    **options,
  )
  first, second = (
    formats.refinement_gain(part, importance=squares, **options)
    for part in (w[:8], w[8:])
  )
  np.testing.assert_allclose(found.gain, first + 3 * second)
  assert found.rows == 12
  apart = budget.candidates(
    [w[:8], w[8:]],
    gradients=gradients,
    inputs=squares,
    activation_gain=np.ones(20),
    **options,
  )
  lost = (gradients[:, None] * np.square(w, dtype=np.float64)).sum(0) / 2
  np.testing.assert_allclose(
    apart.gain, found.gain - np.append(lost.reshape(5, 4).sum(1), [0, 0, 0])
  )
