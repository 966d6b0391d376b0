"""The run-time precision policy (paper section 3.1, Table 1).

Pure functions on a pytree with one entry for each request. A pass over the
layers starts with `start_prefill` or `start_step`; `level_bits` reads the level
of the layer about to run, and `update_prefill` or `update_decode` takes what
the layer did and fixes the level of the next one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax.errors import PrecisionError
from autoematic_jax.signals import REDUCTIONS
from autoematic_jax.signals import Reduction

KNOWN_LEVELS = (2, 4, 6, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """Every constant of the policy.

  Attributes:
    levels: Bits to choose from, ascending; each means W, A and KV of that
      many bits, except that 2 runs as W2A4KV4.
    prefill_run: Layers in a row below (above) the mean that lower (raise) the
      next one after the spike of a prefill (n_p).
    alpha: Run that lowers in high-entropy and raises in low-entropy decode
      steps.
    beta: Run that raises in high-entropy and lowers in low-entropy steps.
    tau: Normalized entropy from which a decode step is a high-entropy one.
    lambda_prefill: Weight of the layer's activity in prefill; the rest goes
      to the entropy, which a prefill does not have.
    lambda_decode: The same in decode.
    spike_sigmas: Standard deviations above the mean that make a spike.
    spike_min_layers: Layers that the statistics need before a spike.
    skip_layers: First layers that stay out of statistics and runs: their
      input is the bare embedding.
    min_stats: Values that the statistics need before a decode rule fires.
    decode_initial_level: Bits of the first layer of each decode step; where
      `levels` lacks it, the next higher level, else the highest.
    high_entropy_level: Bits at which a high-entropy step starts and below
      which it does not go, where that is higher.
    kv_min_level: Bits that keys and values are kept at, where the layer's
      level is lower.
    entropy_top_k: Tokens that the entropy looks at.
    epsilon: Added to the norm in the layer's activity.
    reduction: How a prefill's activity is reduced over tokens.
    stats_scope: `sequence` keeps decode statistics over all steps, `step`
      starts them anew at each.
    layer_floors: Bits below which each layer never runs, such as what
      `autoematic profile` measured; empty where no layer has a floor. Where
      `levels` lacks one, the next higher level, else the highest.
  """

  levels: tuple[int, ...] = (2, 4, 6)
  prefill_run: int = 2
  alpha: int = 4
  beta: int = 2
  tau: float = 0.05
  lambda_prefill: float = 1.0
  lambda_decode: float = 0.7
  spike_sigmas: float = 3.0
  spike_min_layers: int = 3
  skip_layers: int = 1
  min_stats: int = 2
  decode_initial_level: int = 4
  high_entropy_level: int = 6
  kv_min_level: int = 6
  entropy_top_k: int = 10
  epsilon: float = 1e-6
  reduction: Reduction = "token_median"
  stats_scope: str = "sequence"
  layer_floors: tuple[int, ...] = ()

  def __post_init__(self):
    levels = tuple(self.levels)
    object.__setattr__(self, "levels", levels)
    object.__setattr__(self, "layer_floors", tuple(self.layer_floors))
    ascending = list(levels) == sorted(set(levels))
    if not levels or not ascending or not set(levels) <= set(KNOWN_LEVELS):
      raise PrecisionError(
        f"{levels=} must be ascending and out of {KNOWN_LEVELS}"
      )
    for name in ("prefill_run", "alpha", "beta", "min_stats"):
      self._need(name, getattr(self, name) >= 1, ">= 1")
    for name in ("spike_min_layers", "skip_layers", "spike_sigmas"):
      self._need(name, getattr(self, name) >= 0, ">= 0")
    for name in ("tau", "lambda_prefill", "lambda_decode"):
      self._need(name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
    self._need("entropy_top_k", self.entropy_top_k >= 2, ">= 2")
    self._need("epsilon", self.epsilon > 0, "> 0")
    for name in ("decode_initial_level", "high_entropy_level", "kv_min_level"):
      known = getattr(self, name) in KNOWN_LEVELS
      self._need(name, known, f"one of {KNOWN_LEVELS}")
    known = set(self.layer_floors) <= set(KNOWN_LEVELS)
    self._need("layer_floors", known, f"out of {KNOWN_LEVELS}")
    self._need("reduction", self.reduction in REDUCTIONS, f"in {REDUCTIONS}")
    scopes = ("sequence", "step")
    self._need("stats_scope", self.stats_scope in scopes, f"in {scopes}")

  def _need(self, name, holds, what):
    if not holds:
      raise PrecisionError(f"{name}={getattr(self, name)!r} must be {what}")

  @property
  def initial_index(self) -> int:
    """Index of the level at which a low-entropy decode step starts."""
    return self._index(self.decode_initial_level)

  @property
  def high_entropy_index(self) -> int:
    """Index of the level at which a high-entropy decode step starts."""
    return self._index(max(self.decode_initial_level, self.high_entropy_level))

  def _index(self, wanted):
    """Index of the lowest level that is at least the wanted one."""
    above = [i for i, level in enumerate(self.levels) if level >= wanted]
    return above[0] if above else len(self.levels) - 1

  def to_dict(self) -> dict[str, Any]:
    """A JSON-ready dict that `from_dict` reads back."""
    lists = {
      name: list(getattr(self, name)) for name in ("levels", "layer_floors")
    }
    return {**dataclasses.asdict(self), **lists}

  @classmethod
  def from_dict(cls, data: dict[str, Any]) -> "PolicyConfig":
    """Rebuilds a config.

    Raises:
      PrecisionError: A key is unknown or a value is refused.
    """
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - known)
    if unknown:
      raise PrecisionError(
        f"policy has unknown keys {unknown}; known: {sorted(known)}"
      )
    return cls(**data)


PAPER = PolicyConfig(
  high_entropy_level=2, kv_min_level=2, reduction="frobenius", tau=0.1
)
"""All decode steps start alike; keys and values are at their layer's level."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyState:
  """Where the policy stands, one entry a request.

  Attributes:
    level: Index into `levels` of the layer about to run.
    side: Side of the mean of the current run: 1 above, -1 below, 0 none.
    run: Layers in the current run.
    count: Values in the statistics.
    mean: Their running mean (Welford).
    m2: Their running sum of squared deviations.
    spiked: Whether this prefill has met its spike.
    entropy: Normalized entropy of the previous step.
  """

  level: Int[Array, "B"]
  side: Int[Array, "B"]
  run: Int[Array, "B"]
  count: Int[Array, "B"]
  mean: Float[Array, "B"]
  m2: Float[Array, "B"]
  spiked: Bool[Array, "B"]
  entropy: Float[Array, "B"]


def pack(state: PolicyState) -> Float[Array, "S B"]:
  """The state as one array, which a GPU updates by one kernel; see `unpack`."""
  return jnp.stack(
    [field.astype(jnp.float32) for field in jax.tree.leaves(state)]
  )


def unpack(packed: Float[Array, "S B"]) -> PolicyState:
  """Undoes `pack`: all whole numbers are small enough to be exact."""
  fields = dataclasses.fields(PolicyState)
  return PolicyState(
    **{
      field.name: packed[index].astype(_DTYPES.get(field.name, jnp.float32))
      for index, field in enumerate(fields)
    }
  )


_DTYPES = {
  **dict.fromkeys(("level", "side", "run", "count"), jnp.int32),
  "spiked": jnp.bool_,
}


def _fresh(batch, index):
  def zeros(dtype):
    return jnp.zeros((batch,), dtype)

  return PolicyState(
    level=jnp.full((batch,), index, jnp.int32),
    side=zeros(jnp.int32),
    run=zeros(jnp.int32),
    count=zeros(jnp.int32),
    mean=zeros(jnp.float32),
    m2=zeros(jnp.float32),
    spiked=zeros(bool),
    entropy=zeros(jnp.float32),
  )


def start_prefill(config: PolicyConfig, batch: int) -> PolicyState:
  """State before the first layer of a prefill (or refill)."""
  return _fresh(batch, len(config.levels) - 1)


def start_decode(config: PolicyConfig, batch: int) -> PolicyState:
  """State before the first decode step of a sequence."""
  return _fresh(batch, config.initial_index)


def start_step(
  config: PolicyConfig, state: PolicyState, entropy: Float[Array, "B"]
) -> PolicyState:
  """Begins a decode step: initial level, no run, statistics as scoped.

  Args:
    config: Constants.
    state: State after the previous step.
    entropy: Normalized entropy of the previous step's logits.

  Returns:
    State before the first layer of the step.
  """
  fresh = _fresh(state.level.shape[0], config.initial_index)
  high = entropy >= config.tau
  level = jnp.where(high, config.high_entropy_index, config.initial_index)
  fresh = dataclasses.replace(fresh, level=level.astype(jnp.int32))
  if config.stats_scope == "step":
    return dataclasses.replace(fresh, entropy=entropy)
  return dataclasses.replace(
    fresh,
    count=state.count,
    mean=state.mean,
    m2=state.m2,
    entropy=entropy,
  )


def level_bits(
  config: PolicyConfig, state: PolicyState, layer: Int[Array, ""] | int
) -> Int[Array, "B"]:
  """Nominal bits of the layer about to run.

  A layer's floor raises what it runs at and leaves the state alone: the layer
  after it runs at what the signals ask for.
  """
  bits = jnp.asarray(config.levels, jnp.int32)[state.level]
  if not config.layer_floors:
    return bits
  floors = [config.levels[config._index(bits)] for bits in config.layer_floors]
  return jnp.maximum(bits, jnp.asarray(floors, jnp.int32)[layer])


def update_prefill(
  config: PolicyConfig,
  state: PolicyState,
  activity: Float[Array, "B"],
  layer: Int[Array, ""] | int,
) -> PolicyState:
  """Takes a prefill layer's activity and fixes the next layer's level.

  Until the spike, the first layer that rises far above the mean of those
  before it, everything runs at the highest level; without one, all of it does.
  A NaN activity changes nothing.
  """
  metric = config.lambda_prefill * activity
  sigma = jnp.sqrt(state.m2 / jnp.maximum(state.count, 1))
  enough = state.count >= max(config.spike_min_layers, 1)
  spike = enough & (metric > state.mean + config.spike_sigmas * sigma)
  lower = raise_ = jnp.full_like(state.run, config.prefill_run)
  followed = _follow_run(
    config, state, metric, lower, raise_, state.spiked, lowest=0
  )
  counted = (layer >= config.skip_layers) & ~jnp.isnan(metric)
  followed = dataclasses.replace(
    _observe(followed, metric), spiked=state.spiked | spike
  )
  return _select(counted, followed, state)


def update_decode(
  config: PolicyConfig,
  state: PolicyState,
  activity: Float[Array, "B"],
  layer: Int[Array, ""] | int,
) -> PolicyState:
  """Takes a decode layer's activity and fixes the next layer's level.

  A NaN metric changes nothing.
  """
  weight = config.lambda_decode
  metric = weight * activity + (1 - weight) * state.entropy
  high = state.entropy >= config.tau
  lower = jnp.where(high, config.alpha, config.beta)
  raise_ = jnp.where(high, config.beta, config.alpha)
  ready = state.count >= config.min_stats
  lowest = jnp.where(high, config._index(config.high_entropy_level), 0)
  followed = _follow_run(
    config, state, metric, lower, raise_, ready, lowest=lowest
  )
  counted = (layer >= config.skip_layers) & ~jnp.isnan(metric)
  return _select(counted, _observe(followed, metric), state)


def _follow_run(
  config, state, metric, lower_after, raise_after, ready, *, lowest
):
  """Extends or starts a run; a long enough one changes the level and ends.

  Args:
    config: Constants.
    state: State at the layer that just ran.
    metric: Its metric.
    lower_after: Length of a run below the mean that lowers.
    raise_after: Length of a run above the mean that raises.
    ready: Where rules apply; elsewhere no run is kept.
    lowest: Index of the level below which none falls.

  Returns:
    The state with level, side and run of the next layer.
  """
  side = jnp.sign(metric - state.mean).astype(jnp.int32)
  side = jnp.where(ready, side, 0)
  run = jnp.where(side == state.side, state.run + 1, 1)
  run = jnp.where(side == 0, 0, run)
  wanted = jnp.where(side > 0, raise_after, lower_after)
  fires = (side != 0) & (run >= wanted)
  level = jnp.clip(state.level + side, lowest, len(config.levels) - 1)
  return dataclasses.replace(
    state,
    level=jnp.where(fires, level, state.level),
    side=jnp.where(fires, 0, side),
    run=jnp.where(fires, 0, run),
  )


def _observe(state, metric):
  """Adds a metric to the running statistics."""
  count = state.count + 1
  delta = metric - state.mean
  mean = state.mean + delta / count
  return dataclasses.replace(
    state,
    count=count,
    mean=mean,
    m2=state.m2 + delta * (metric - mean),
  )


def _select(condition, new, old):
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
