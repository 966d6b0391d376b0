"""Logits of every position of a pass through a decoder."""

import jax.numpy as jnp
import numpy as np

from autoematic_jax import policy as policy_lib


def run(decoder, tokens, start, cache, phase, bits=32):
  """Logits `[B, T, V]` of new tokens, and the cache with them in it."""
  config = decoder.config
  policy_config = policy_lib.PolicyConfig()
  batch, count = tokens.shape
  hidden, cache, _, _ = decoder.run_layers(
    jnp.asarray(tokens),
    start=jnp.full((batch,), start, jnp.int32),
    lengths=jnp.full((batch,), count, jnp.int32),
    cache=cache,
    policy=policy_lib.start_prefill(policy_config, batch),
    forced=jnp.full((config.num_layers,), bits, jnp.int32),
    policy_config=policy_config,
    phase=phase,
  )
  flat = hidden.reshape(batch * count, -1)
  return np.asarray(decoder.logits(flat)).reshape(batch, count, -1), cache
