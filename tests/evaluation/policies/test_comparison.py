"""Policies beside the oracle, and their replay from recorded signals."""

import dataclasses

import numpy as np
import pytest

import autoematic_jax
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.policies import comparison
from autoematic_jax.evaluation.policies import contestants
from autoematic_jax.evaluation.policies import scores
from autoematic_jax.evaluation.policies import sensitivity
from autoematic_jax.evaluation.policies.passes import Session
from autoematic_jax.evaluation.policies.passes import passes_of
from autoematic_jax.evaluation.policies.replay import Signals
from autoematic_jax.evaluation.policies.replay import replay
from autoematic_jax.policy import PAPER
from autoematic_jax.policy import PolicyConfig

NAMES = ["adaptive", "instantaneous", "activity"]
NAMES += ["uniform 2", "uniform 4", "uniform 6", "oracle", "random", "static"]


@pytest.fixture(scope="module")
def compared(judged, baseline, rows):
  return comparison.Comparison(
    judged=judged, baseline=baseline, rows=rows, journal=Journal(None, {})
  )


@pytest.fixture(scope="module")
def windows(judged):
  ids = judged.tokenizer.encode("The capital of France is Paris, and " * 6)
  return np.asarray(ids[:64], np.int32).reshape(2, 32)


@pytest.fixture(scope="module")
def measured(compared, windows):
  """Rows of scores by policy, and what `adaptive` saw."""
  found, signals = comparison.measure(compared, windows, 0)
  return {row["policy"]: row for row in found}, signals


def test_every_policy_is_scored(measured, rows):
  found, _ = measured
  assert list(found) == NAMES
  for row in found.values():
    assert row["passes"] == sum(len(one["passes"]) for one in rows)
    assert row["conversations"] == 2
    assert list(row["by_kind"]) == ["prefill", "refill", "decode"]
    assert row["by_kind"]["refill"]["conversations"] == 1
    low, high = row["kl_mean_interval"]
    assert low <= row["kl_mean"] <= high
    assert sum(row["shares"].values()) == pytest.approx(1)


def test_rates_count_layers_below_and_above(measured, rows):
  found, signals = measured
  wanted = np.concatenate([contestants.oracle_levels(row) for row in rows])
  told = np.concatenate([one["oracle_levels"] for one in signals])
  np.testing.assert_array_equal(told, wanted)
  for level in (2, 4, 6):
    row = found[f"uniform {level}"]
    equal = (wanted == level).mean()
    total = row["underprovision"] + row["overprovision"] + equal
    assert total == pytest.approx(1)
  assert found["uniform 6"]["underprovision"] == 0
  assert found["uniform 2"]["overprovision"] == 0
  levels = np.concatenate([one["levels"] for one in signals])
  row = found["adaptive"]
  assert row["underprovision"] == (levels < wanted).mean()
  assert row["overprovision"] == (levels > wanted).mean()
  assert row["execution_bits"] == levels.mean()


def test_the_oracle_meets_itself(measured, rows):
  row = measured[0]["oracle"]
  assert (row["underprovision"], row["overprovision"]) == (0, 0)
  reached = [
    np.mean([step["kl"][-1] for step in one["passes"]]) for one in rows
  ]
  assert row["kl_mean"] == pytest.approx(np.mean(reached), rel=1e-3)


def test_static_and_random_run_at_the_bits_of_adaptive(measured, judged):
  found, _ = measured
  bits = found["adaptive"]["execution_bits"]
  # A step of one layer moves the mean by 2 / layers.
  half = 1 / judged.config.num_layers + 1e-9
  assert found["static"]["execution_bits"] == pytest.approx(bits, abs=half)
  assert found["random"]["execution_bits"] == pytest.approx(bits, abs=0.4)


def test_the_policy_runs_as_it_does_in_generation(judged):
  result = autoematic_jax.generate(judged, "def f(x):", max_new_tokens=12)
  turn = judged.tokenizer.encode("def f(x):")
  passes = passes_of([turn], result.token_ids)
  session = Session(judged, 128)
  levels = [np.asarray(session.run(step).levels) for step in passes]
  np.testing.assert_array_equal(levels[0], result.prefill_levels[:, 0])
  np.testing.assert_array_equal(levels[1:], result.trace[:, :, 0])


def test_keys_and_values_may_stay_above_the_level_of_their_layer(judged):
  step = passes_of([judged.tokenizer.encode("def f(x):")], [[2]])[0]

  def run(forced=None, **options):
    policy = dataclasses.replace(PAPER, levels=(4,), **options)
    session = Session(judged, 64, policy)
    levels = session.run(step, forced).levels
    assert (np.asarray(levels) == 4).all()
    return np.asarray(session.memory.cache.planes["codes"])

  papers = run()
  # Signs and eight magnitudes.
  assert len(np.unique(papers)) <= 16 < len(np.unique(run(kv_min_level=6)))
  np.testing.assert_array_equal(run(kv_min_level=4), papers)
  fixed = np.full((judged.config.num_layers,), 4)
  np.testing.assert_array_equal(run(fixed, kv_min_level=6), papers)


def test_replaying_signals_gives_the_levels_of_the_run(measured, judged):
  signals = [Signals.from_dict(recorded) for recorded in measured[1]]
  replayed = replay(judged.policy, signals)
  for levels, recorded in zip(replayed, measured[1], strict=True):
    np.testing.assert_array_equal(levels, recorded["levels"])
  assert len(np.unique(measured[1][0]["levels"])) > 1


def test_statistics_of_decode_go_on_over_a_refill():
  """The second answer starts with the mean of the first."""
  config = PolicyConfig(beta=1, alpha=1, min_stats=2, skip_layers=0)
  activity = np.full((4, 5), 1.0, np.float32)
  activity[3] = 0.5
  signals = Signals(
    decode=np.asarray([False, True, False, True]),
    activity=activity,
    entropy=np.zeros((4,), np.float32),
  )
  alone = dataclasses.replace(
    signals,
    decode=signals.decode[2:],
    activity=activity[2:],
    entropy=signals.entropy[2:],
  )
  # Below the mean of what came before; alone all values are the mean.
  both = replay(config, [signals, alone])
  assert both[0][3].tolist() == [4, 2, 2, 2, 2]
  assert both[1][1].tolist() == [4, 4, 4, 4, 4]
  assert (both[0][[0, 2]] == 6).all()


def test_layers_that_matter_least_go_down_first():
  costs = np.asarray([[0.9, 0.3, 0.2], [0.1, 0.2, 0.1], [0.0] * 3])
  for bits, levels in (
    (6.0, [6, 6, 6]),
    (5.5, [4, 6, 6]),
    (4.6, [4, 6, 4]),
    (4.0, [4, 6, 2]),
    (3.4, [4, 4, 2]),
    (2.0, [2, 2, 2]),
  ):
    assert contestants.assign((2, 4, 6), costs, bits) == levels


def test_sensitivity_is_that_of_one_layer(compared, windows, judged):
  baseline = compared.baseline
  costs = sensitivity.measure(judged, baseline, windows, compared.journal)
  assert costs.shape == (3, judged.config.num_layers)
  # Two bits in any layer cost more than six in all.
  assert (costs[0] > costs[2]).all()
  forced = np.asarray([6, 6, 2, 6, 6, 6], np.int32)
  expected = sensitivity.mean_divergence(judged, baseline, windows, forced)
  assert costs[0, 2] == expected


def test_a_model_may_be_its_own_reference(judged, windows):
  costs = sensitivity.measure(judged, judged, windows, Journal(None, {}))
  np.testing.assert_allclose(costs[-1], 0, atol=1e-6)
  assert (costs[:-1] > 0).all()


def test_a_floor_is_the_lowest_level_within_bounds():
  costs = np.asarray([[0.9, 0.3, 0.02], [0.1, 0.03, 0.01], [0.01] * 3])
  for max_kl, highest, expected in (
    (0.05, 6, [6, 4, 2]),
    (0.05, 4, [4, 4, 2]),
    (1.0, 6, [2, 2, 2]),
    (0.0, 6, [6, 6, 4]),
  ):
    found = sensitivity.floors((2, 4, 6), costs, max_kl, highest)
    assert found == expected


def test_kinds_that_did_not_occur_are_left_out(rows):
  records = [
    {"levels": one.tolist(), "kl": [0.0] * len(one)}
    for one in map(contestants.oracle_levels, rows[1:])
  ]
  row = scores.summary(rows[1:], records)
  assert list(row["by_kind"]) == ["prefill", "decode"]
  assert "oracle" in scores.table([{"policy": "oracle", **row}])
