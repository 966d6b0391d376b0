"""The policy against golden traces and against a plain restatement of it."""

import dataclasses
import json
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from autoematic_jax import policy as policy_lib
from autoematic_jax.errors import PrecisionError
from autoematic_jax.policy import PAPER
from autoematic_jax.policy import PolicyConfig


@pytest.fixture(scope="module")
def golden(data_dir):
  return json.loads((data_dir / "numerics.json").read_text())


def prefill_trace(config, activity):
  """Bits `[layers, B]` for activities `[layers, B]`."""

  def body(state, inputs):
    row, layer = inputs
    bits = policy_lib.level_bits(config, state, layer)
    return policy_lib.update_prefill(config, state, row, layer), bits

  state = policy_lib.start_prefill(config, activity.shape[1])
  layers = jnp.arange(activity.shape[0], dtype=jnp.int32)
  return np.asarray(lax.scan(body, state, (jnp.asarray(activity), layers))[1])


def decode_trace(config, activity, entropy):
  """Bits `[steps, layers, B]`; the state is carried through both scans."""
  _, layers, batch = activity.shape

  def body(state, inputs):
    row, layer = inputs
    bits = policy_lib.level_bits(config, state, layer)
    return policy_lib.update_decode(config, state, row, layer), bits

  def step(state, inputs):
    rows, g = inputs
    state = policy_lib.start_step(config, state, g)
    return lax.scan(body, state, (rows, jnp.arange(layers, dtype=jnp.int32)))

  state = policy_lib.start_decode(config, batch)
  inputs = (jnp.asarray(activity), jnp.asarray(entropy))
  return np.asarray(
    jax.jit(lambda s, i: lax.scan(step, s, i))(state, inputs)[1]
  )


class Restated:
  """One request's policy in plain Python and float64.

  `margin` is the smallest distance of a comparison from a tie.
  """

  def __init__(self, config):
    self.config = config
    self.values = []
    self.margin = math.inf
    self.lowest = 0

  def _side(self, metric):
    mean = sum(self.values) / len(self.values)
    self.margin = min(self.margin, abs(metric - mean))
    return 1 if metric > mean else -1

  def _run(self, metric, lower, raise_):
    side = self._side(metric)
    self.run = self.run + 1 if side == self.side else 1
    self.side = side
    if self.run >= (raise_ if side > 0 else lower):
      top = len(self.config.levels) - 1
      self.level = min(max(self.level + side, self.lowest), top)
      self.side = self.run = 0

  def prefill(self, activities):
    config, self.values = self.config, []
    self.level, self.side, self.run = len(config.levels) - 1, 0, 0
    spiked, trace = False, []
    for layer, activity in enumerate(activities):
      trace.append(config.levels[self.level])
      if layer < config.skip_layers:
        continue
      metric = config.lambda_prefill * activity
      if spiked:
        self._run(metric, config.prefill_run, config.prefill_run)
      elif len(self.values) >= config.spike_min_layers:
        edge = np.mean(self.values) + config.spike_sigmas * np.std(self.values)
        self.margin = min(self.margin, abs(metric - edge))
        spiked = metric > edge
      self.values.append(metric)
    return trace

  def decode(self, steps, entropies):
    config, self.values, traces = self.config, [], []
    for activities, entropy in zip(steps, entropies, strict=True):
      if config.stats_scope == "step":
        self.values = []
      self.level, self.side, self.run = config.initial_index, 0, 0
      self.margin = min(self.margin, abs(entropy - config.tau))
      lower, raise_ = config.beta, config.alpha
      self.lowest = 0
      if entropy >= config.tau:
        lower, raise_ = config.alpha, config.beta
        below = [b for b in config.levels if b < config.high_entropy_level]
        self.lowest = min(len(below), len(config.levels) - 1)
        self.level = max(self.level, self.lowest)
      trace = []
      for layer, activity in enumerate(activities):
        trace.append(config.levels[self.level])
        if layer < config.skip_layers:
          continue
        weight = config.lambda_decode
        metric = weight * activity + (1 - weight) * entropy
        if len(self.values) >= config.min_stats:
          self._run(metric, lower, raise_)
        self.values.append(metric)
      traces.append(trace)
    return traces


def test_golden_prefill(golden):
  for case in golden["policy_prefill"]:
    activity = np.asarray(case["M"], np.float32)[:, None]
    levels = prefill_trace(PAPER, activity)[:, 0]
    assert levels.tolist() == case["levels"]


def test_golden_decode(golden):
  case = golden["policy_decode"]
  activity = np.asarray(case["L_A"], np.float32)[..., None]
  entropy = np.asarray(case["G_E"], np.float32)[:, None]
  levels = decode_trace(PAPER, activity, entropy)[..., 0]
  assert levels.tolist() == case["levels"]


configs = st.builds(
  PolicyConfig,
  levels=st.sampled_from([(2, 4, 6), (4, 6), (2, 4, 6, 8), (6,)]),
  prefill_run=st.integers(1, 3),
  alpha=st.integers(1, 5),
  beta=st.integers(1, 4),
  skip_layers=st.integers(0, 2),
  spike_min_layers=st.integers(1, 4),
  spike_sigmas=st.sampled_from([0.5, 1.0, 3.0]),
  stats_scope=st.sampled_from(["sequence", "step"]),
  high_entropy_level=st.sampled_from([2, 6, 8]),
)


@hypothesis.settings(max_examples=8)
@hypothesis.given(config=configs, seed=st.integers(0, 2**31))
def test_agrees_with_the_restatement(config, seed):
  rng = np.random.default_rng(seed)
  activity = rng.lognormal(0, 1, (3, 14, 2)).astype(np.float32)
  entropy = rng.uniform(0, 0.3, (3, 2)).astype(np.float32)
  prefill = prefill_trace(config, activity[0])
  decode = decode_trace(config, activity, entropy)
  for request in range(2):
    restated = Restated(config)
    expected = restated.prefill(activity[0, :, request].tolist())
    if restated.margin > 1e-4:
      assert prefill[:, request].tolist() == expected
    restated = Restated(config)
    expected = restated.decode(
      activity[:, :, request].tolist(), entropy[:, request].tolist()
    )
    if restated.margin > 1e-4:
      assert decode[:, :, request].tolist() == expected


def test_a_request_does_not_depend_on_its_neighbours():
  rng = np.random.default_rng(0)
  activity = rng.lognormal(0, 1, (4, 20, 5)).astype(np.float32)
  entropy = rng.uniform(0, 0.3, (4, 5)).astype(np.float32)
  together = decode_trace(PolicyConfig(), activity, entropy)
  for request in range(5):
    one = slice(request, request + 1)
    alone = decode_trace(PolicyConfig(), activity[..., one], entropy[:, one])
    np.testing.assert_array_equal(alone[..., 0], together[..., request])


def test_nan_changes_nothing_for_its_request_and_others():
  activity = np.full((12, 2), 0.5, np.float32)
  activity[5:, 1] = 0.1
  activity[3, 0] = np.nan
  config = PolicyConfig(min_stats=1, skip_layers=0)
  entropy = np.zeros((1, 2), np.float32)
  levels = decode_trace(config, activity[None], entropy)[0]
  clean = decode_trace(config, activity[None, :, 1:], entropy[:, 1:])[0]
  np.testing.assert_array_equal(levels[:, 1], clean[:, 0])
  assert (levels[:, 0] == 4).all()


def test_without_a_spike_nothing_is_lowered():
  falling = np.linspace(1.0, 0.1, 30, dtype=np.float32)[:, None]
  assert (prefill_trace(PolicyConfig(), falling) == 6).all()


def test_decode_starts_at_the_nearest_level_that_is_there():
  for levels, start in (((2, 4, 6), 4), ((6, 8), 6), ((2,), 2), ((4, 8), 4)):
    config = PolicyConfig(levels=levels)
    state = policy_lib.start_decode(config, 1)
    assert policy_lib.level_bits(config, state, 0).tolist() == [start]


def test_steps_after_an_uncertain_token_may_start_higher():
  entropy = jnp.asarray([0.05, 0.10, 0.9], jnp.float32)
  for options, starts in (
    ({}, [4, 4, 4]),
    ({"high_entropy_level": 6}, [4, 6, 6]),
    ({"high_entropy_level": 6, "tau": 0.5}, [4, 4, 6]),
    ({"high_entropy_level": 4, "decode_initial_level": 6}, [6, 6, 6]),
    ({"high_entropy_level": 6, "levels": (2, 4)}, [4, 4, 4]),
  ):
    config = dataclasses.replace(PAPER, **options)
    state = policy_lib.start_step(
      config, policy_lib.start_decode(config, 3), entropy
    )
    assert policy_lib.level_bits(config, state, 0).tolist() == starts


def test_high_entropy_steps_do_not_fall_below_their_level():
  """Activities below the mean lower a layer, but no further than that."""
  falling = np.linspace(1.0, 0.1, 20, dtype=np.float32)[None, :, None]
  for entropy, least in ((0.01, 2), (0.9, 4)):
    config = PolicyConfig(high_entropy_level=4, alpha=1, beta=1)
    levels = decode_trace(config, falling, np.full((1, 1), entropy, np.float32))
    assert levels.min() == least


def test_a_layer_does_not_run_below_its_floor():
  rng = np.random.default_rng(0)
  activity = rng.lognormal(0, 1, (3, 8, 2)).astype(np.float32)
  entropy = rng.uniform(0, 0.3, (3, 2)).astype(np.float32)
  config = dataclasses.replace(PAPER, alpha=1, beta=1)
  free = decode_trace(config, activity, entropy)
  floors = (2, 4, 6, 8, 2, 4, 6, 2)
  config = dataclasses.replace(config, layer_floors=floors)
  bound = decode_trace(config, activity, entropy)
  # The signals' own level stays as it was; 8 bits are not offered.
  least = np.minimum(np.asarray(floors)[None, :, None], 6)
  np.testing.assert_array_equal(bound, np.maximum(free, least))
  assert (bound > free).any()
  prefill = prefill_trace(config, activity[0])
  assert (prefill >= least[0]).all()


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("layer_floors", (4, 5)),
    ("levels", (6, 4)),
    ("levels", (3, 4)),
    ("levels", ()),
    ("alpha", 0),
    ("tau", 1.5),
    ("reduction", "max"),
    ("stats_scope", "batch"),
    ("entropy_top_k", 1),
    ("decode_initial_level", 5),
    ("high_entropy_level", 3),
    ("kv_min_level", 5),
  ],
)
def test_nonsense_is_refused_by_name(field, value):
  with pytest.raises(PrecisionError, match=field):
    PolicyConfig(**{field: value})


def test_config_round_trips_and_refuses_unknown_keys():
  config = PolicyConfig(levels=(4, 6), tau=0.2, layer_floors=(4, 6, 4))
  data = json.loads(json.dumps(config.to_dict()))
  assert PolicyConfig.from_dict(data) == config
  with pytest.raises(PrecisionError, match="lambda_x"):
    PolicyConfig.from_dict({**data, "lambda_x": 1})
