"""A policy's levels from recorded signals, without the model."""

import dataclasses
from collections.abc import Sequence
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

RECORDED_FIELDS = ("entropy_top_k", "epsilon", "kv_min_level", "reduction")
"""Constants that shape the signals themselves: a replay cannot change them."""


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


def replay(
  config: PolicyConfig, conversations: Sequence[Signals]
) -> list[np.ndarray]:
  """Levels that a policy chooses from recorded signals.

  Under the constants that the signals were recorded with, these are the levels
  of that run. Under others they are what the policy would choose if its levels
  did not change the signals in turn; `RECORDED_FIELDS` stay those of the
  recording.

  Args:
    config: Constants of the policy.
    conversations: Signals of models of one number of layers.

  Returns:
    For each conversation `[P, L]` bits.
  """
  counts = [len(signals.decode) for signals in conversations]
  length = bucket(max(counts))

  def stack(name):
    # Passes that pad a conversation come last and change nothing before them.
    arrays = [getattr(signals, name) for signals in conversations]
    widths = [
      [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)]
      for array in arrays
    ]
    return jnp.asarray(
      np.stack([np.pad(a, w) for a, w in zip(arrays, widths, strict=True)])
    )

  levels = _replay(
    stack("decode"), stack("activity"), stack("entropy"), config=config
  )
  return [
    bits[:count] for bits, count in zip(np.asarray(levels), counts, strict=True)
  ]


@partial(jax.jit, static_argnames="config")
def _replay(
  decode: Bool[Array, "B P"],
  activity: Float[Array, "B P L"],
  entropy: Float[Array, "B P"],
  *,
  config: PolicyConfig,
) -> Int[Array, "B P L"]:
  return jax.vmap(partial(_replay_one, config))(decode, activity, entropy)


def _replay_one(config, decode, activity, entropy):
  layers = jnp.arange(activity.shape[1], dtype=jnp.int32)

  def run(state, activity, update):
    def layer_step(state, inputs):
      layer, value = inputs
      bits = policy_lib.level_bits(config, state, layer)[0]
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
