"""The signals against float64 and under padding."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax import signals


def test_golden_entropy(data_dir):
  for case in json.loads((data_dir / "numerics.json").read_text())["entropy"]:
    logits = jnp.asarray([case["logits"]], jnp.float32)
    found = float(signals.topk_entropy(logits, 10)[0])
    assert found == pytest.approx(case["G_E"], abs=1e-6)


def test_entropy_edges():
  peaked = jnp.asarray([[100.0] + [-jnp.inf] * 20])
  assert float(signals.topk_entropy(peaked, 10)[0]) == 0.0
  few = jnp.zeros((1, 3))
  assert float(signals.topk_entropy(few, 10)[0]) == pytest.approx(1.0)
  rows = jnp.zeros((2, 12)).at[0, 3].set(jnp.nan)
  found = np.asarray(signals.topk_entropy(rows, 10))
  assert np.isnan(found[0])
  assert found[1] == pytest.approx(1.0)


@pytest.mark.parametrize("vocabulary", [640, 641, 703, 5000])
def test_entropy_of_a_large_vocabulary_is_that_of_its_largest(vocabulary):
  rng = np.random.default_rng(vocabulary)
  logits = 3 * rng.standard_normal((4, vocabulary)).astype(np.float32)
  # The largest side by side, one after the other in memory, and equal.
  logits[1, :9] += 50
  logits[2, ::64] += 50
  logits[3] = 0
  top = np.sort(logits.astype(np.float64))[:, -10:]
  p = np.exp(top - top.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  wanted = -(p * np.log(p)).sum(axis=1) / np.log(10)
  found = signals.topk_entropy(jnp.asarray(logits), 10)
  np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("reduction", signals.REDUCTIONS)
def test_activity_matches_float64_and_ignores_padding(reduction):
  rng = np.random.default_rng(0)
  before = rng.standard_normal((2, 9, 16)).astype(np.float32)
  after = before + 0.3 * rng.standard_normal((2, 9, 16)).astype(np.float32)
  mask = np.arange(9)[None] < np.asarray([[9], [4]])
  found = signals.layer_update_activity(
    jnp.asarray(before),
    jnp.asarray(after),
    jnp.asarray(mask),
    reduction=reduction,
    epsilon=1e-6,
  )
  for request, length in enumerate((9, 4)):
    a = before[request, :length].astype(np.float64)
    b = after[request, :length].astype(np.float64)
    axes = None if reduction == "frobenius" else 1
    change = np.sqrt(np.square(b - a).sum(axes))
    ratios = np.sort(change / (np.sqrt(np.square(a).sum(axes)) + 1e-6), None)
    expected = ratios.mean()
    if reduction == "token_median":
      expected = ratios[(length - 1) // 2]
    assert float(found[request]) == pytest.approx(expected, rel=1e-5)
  short = signals.layer_update_activity(
    jnp.asarray(before[1:, :4]),
    jnp.asarray(after[1:, :4]),
    jnp.asarray(mask[1:, :4]),
    reduction=reduction,
    epsilon=1e-6,
  )
  assert float(short[0]) == float(found[1])


def test_one_token_moves_every_reduction_but_the_median():
  before = np.ones((1, 7, 16), np.float32)
  after = np.float32(1.5) * before
  blown = after.copy()
  blown[0, 0] = 1e4
  found = {}
  for reduction in signals.REDUCTIONS:
    found[reduction] = [
      float(
        signals.layer_update_activity(
          jnp.asarray(before),
          jnp.asarray(array),
          jnp.ones((1, 7), bool),
          reduction=reduction,
        )[0]
      )
      for array in (after, blown)
    ]
  for reduction in ("frobenius", "token_mean"):
    assert found[reduction][1] > 1000 * found[reduction][0]
  assert found["token_median"][1] == found["token_median"][0]
