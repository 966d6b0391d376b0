"""A policy's levels from recorded signals, without the model."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax import policy as policy_lib
from autoematic_jax.generation_run import bucket
from autoematic_jax.policy import PolicyConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signals:
  """What a policy saw in a conversation of P passes over L layers.

  Attributes:
    decode: `[P]` whether a pass was a decode step.
    activity: `[P, L]` float32 update activity of each layer.
    entropy: `[P]` float32 normalized entropy of each pass's logits.
  """

  decode: np.ndarray
  activity: np.ndarray
  entropy: np.ndarray

  @classmethod
  def from_dict(cls, data: dict[str, Any]) -> "Signals":
    """Takes an entry of `signals` in a report of `autoematic policies`."""
    return cls(
      decode=np.asarray([kind == "decode" for kind in data["kinds"]]),
      activity=np.asarray(data["activity"], np.float32),
      entropy=np.asarray(data["entropy"], np.float32),
    )


def replay(config: PolicyConfig, signals: Signals) -> np.ndarray:
  """Levels that a policy chooses from recorded signals.

  Under the constants that the signals were recorded with, these are the levels
  of that run. Under others they are what the policy would choose if its levels
  did not change the signals in turn. `reduction`, `epsilon` and
  `entropy_top_k` stay those of the recording.

  Args:
    config: Constants of the policy.
    signals: Of one conversation.

  Returns:
    `[P, L]` bits.
  """
  count = len(signals.decode)
  # Passes that pad the conversation come last and change nothing before them.
  padding = bucket(count) - count
  levels = _replay(
    jnp.asarray(np.pad(signals.decode, (0, padding))),
    jnp.asarray(np.pad(signals.activity, ((0, padding), (0, 0)))),
    jnp.asarray(np.pad(signals.entropy, (0, padding))),
    config=config,
  )
  return np.asarray(levels)[:count]


@partial(jax.jit, static_argnames="config")
def _replay(
  decode: Bool[Array, "P"],
  activity: Float[Array, "P L"],
  entropy: Float[Array, "P"],
  *,
  config: PolicyConfig,
) -> Int[Array, "P L"]:
  layers = jnp.arange(activity.shape[1], dtype=jnp.int32)

  def run(state, activity, update):
    def layer_step(state, inputs):
      layer, value = inputs
      bits = policy_lib.level_bits(config, state)[0]
      return update(config, state, value[None], layer), bits

    return lax.scan(layer_step, state, (layers, activity))

  def decode_step(kept, before, activity):
    state = policy_lib.start_step(config, kept, before)
    return run(state, activity, policy_lib.update_decode)

  def prefill(kept, before, activity):
    state = policy_lib.start_prefill(config, 1)
    return kept, run(state, activity, policy_lib.update_prefill)[1]

  def step(carry, inputs):
    kept, before = carry
    is_decode, activity, entropy = inputs
    kept, bits = lax.cond(
      is_decode, decode_step, prefill, kept, before, activity
    )
    return (kept, entropy[None]), bits

  start = (policy_lib.start_decode(config, 1), jnp.zeros((1,), jnp.float32))
  _, levels = lax.scan(step, start, (decode, activity, entropy))
  return levels
