"""A cache of keys and values for the tests of attention over it."""

import jax.numpy as jnp

from autoematic_jax import kv_cache
from autoematic_jax.kv_codecs import AutoFPCodec

LAYERS, LAYER = 3, 2


def filled(rng, batch, kv_heads, capacity, dim):
  """A cache that is full in one layer, at 4 and 6 bits in turn."""
  cache = kv_cache.init_cache(
    num_layers=LAYERS,
    batch=batch,
    num_kv_heads=kv_heads,
    head_dim=dim,
    capacity=capacity,
    codec=AutoFPCodec(),
  )
  keys, values = (
    jnp.asarray(
      rng.standard_normal((batch, kv_heads, capacity, dim)), jnp.float32
    )
    for _ in range(2)
  )
  levels = jnp.asarray([4, 6] * batch, jnp.int32)[:batch]
  start = jnp.zeros((batch,), jnp.int32)
  return cache.write(jnp.asarray(LAYER), start, keys, values, levels)
