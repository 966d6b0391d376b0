"""The oracle against its definition, computed layer by layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.policies import oracle
from autoematic_jax.evaluation.policies import recording
from autoematic_jax.evaluation.policies.passes import Session
from autoematic_jax.evaluation.policies.passes import divergence
from autoematic_jax.models.layers import Precision

CAPACITY = 128
BUDGET = 0.01


@pytest.fixture(scope="module")
def passes(trace):
  return trace(BUDGET)


def levels_of(passes):
  return np.asarray([step["levels"] for step in passes])


def test_without_a_limit_all_layers_take_the_lowest_level(trace, judged):
  passes = trace(np.inf)
  assert (levels_of(passes) == judged.levels[0]).all()
  kinds = [step["kind"] for step in passes]
  assert kinds[0] == "prefill"
  assert kinds.count("refill") == 2


def test_what_cannot_be_kept_takes_the_highest_level(trace, judged):
  passes = trace(0.0)
  assert (levels_of(passes) == judged.levels[-1]).all()


def test_layers_need_different_levels(passes, judged):
  assert set(levels_of(passes).ravel().tolist()) == set(judged.levels)


class Slow:
  """One layer at a time through caches that are copied freely."""

  def __init__(self, judged, baseline):
    self.judged, self.baseline = judged, baseline
    self.layer = jax.jit(
      lambda decoder, hidden, context, cache, layer, bits: decoder.layers(
        hidden, context, cache, Precision.of(layer, bits, decoder.choices)
      )
    )

    self.log_probabilities = jax.jit(
      lambda decoder, hidden: jax.nn.log_softmax(decoder.logits(hidden)[0])
    )

  def run(self, model, hidden, step, cache, layer, bits):
    decoder = model.decoder
    context = decoder.context(
      jnp.asarray([step.start]),
      jnp.asarray([len(step.tokens)]),
      len(step.padded()),
    )
    bits = jnp.asarray([bits], jnp.int32)
    return self.layer(decoder, hidden, context, cache, jnp.int32(layer), bits)

  def finish(self, hidden, step, cache, first):
    """Log-probabilities once full precision has run the rest."""
    for layer in range(first, self.baseline.config.num_layers):
      hidden, cache = self.run(self.baseline, hidden, step, cache, layer, 32)
    last = hidden[:, len(step.tokens) - 1]
    return self.log_probabilities(self.baseline.decoder, last), cache


def test_every_level_is_the_lowest_within_the_budget(
  judged, baseline, recordings, passes
):
  slow = Slow(judged, baseline)
  cache = judged.init_cache(1, CAPACITY)
  full_cache = baseline.init_cache(1, CAPACITY)
  highest = judged.levels[-1]
  for step, found in zip(recordings[0].passes, passes, strict=True):
    tokens = jnp.asarray(step.padded())[None]
    log_p, full_cache = slow.finish(
      baseline.decoder.embed(tokens), step, full_cache, 0
    )
    hidden = judged.decoder.embed(tokens)
    for layer, (bits, kl) in enumerate(
      zip(found["levels"], found["kl"], strict=True)
    ):
      tried = {
        level: slow.run(judged, hidden, step, cache, layer, level)
        for level in judged.levels
        if level <= bits
      }
      reached = {
        level: float(
          divergence(log_p, slow.finish(out, step, full_cache, layer + 1)[0])
        )
        for level, (out, _) in tried.items()
      }
      assert kl == pytest.approx(reached.pop(bits), rel=1e-3, abs=1e-6)
      assert kl <= BUDGET or bits == highest
      assert all(lower > BUDGET for lower in reached.values())
      hidden, cache = tried[bits]


def test_what_was_not_chosen_leaves_no_trace(
  judged, baseline, recordings, passes
):
  """The cache is that of a run to which the chosen levels were told."""
  full = Session(baseline, CAPACITY)
  told = Session(judged, CAPACITY)
  cache = judged.init_cache(1, CAPACITY)
  for step, found in zip(recordings[0].passes, passes, strict=True):
    target = full.run(step)
    before = jax.tree.map(np.asarray, full.memory.cache)
    cache, levels, kl = oracle.choose(
      judged.decoder,
      baseline.decoder,
      jnp.asarray(step.padded()),
      jnp.asarray([step.start], jnp.int32),
      jnp.asarray([len(step.tokens)], jnp.int32),
      cache,
      full.memory.cache,
      target.log_probabilities,
      jnp.float32(BUDGET),
      levels=judged.levels,
    )
    assert levels.tolist() == found["levels"]
    output = told.run(step, found["levels"])
    for mine, theirs in (
      (cache, told.memory.cache),
      (full.memory.cache, before),
    ):
      jax.tree.map(np.testing.assert_array_equal, mine.planes, theirs.planes)
    reached = divergence(target.log_probabilities, output.log_probabilities)
    assert float(kl[-1]) == pytest.approx(float(reached), rel=1e-3, abs=1e-6)


def test_models_that_do_not_belong_together_are_refused(judged, baseline):
  oracle.check(judged, baseline)
  with pytest.raises(AutoematicError, match="the checkpoint holds fp32"):
    oracle.check(baseline, baseline)
  with pytest.raises(AutoematicError, match="--baseline holds autofp6"):
    oracle.check(judged, judged)
  config = dataclasses.replace(baseline.config, num_layers=4)
  other = dataclasses.replace(baseline, config=config)
  with pytest.raises(AutoematicError, match="num_layers is 4"):
    oracle.check(judged, other)


def test_recordings_are_read_back(recordings):
  again = recording.Recording.from_dict(recordings[0].to_dict())
  assert again == recordings[0]
