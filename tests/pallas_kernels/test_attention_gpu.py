"""The decode attention kernel on a Hopper GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax import kv_cache
from autoematic_jax.errors import PrecisionError
from autoematic_jax.kv_codecs import AutoFPCodec
from autoematic_jax.models import attention as reference
from autoematic_jax.pallas_kernels import attention
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90

pytestmark = pytest.mark.gpu

LAYERS, LAYER = 2, 1


@pytest.fixture(autouse=True)
def hopper():
  try:
    mosaic_sm90.check_device()
  except PrecisionError as error:
    pytest.skip(str(error))


@pytest.mark.parametrize("capacity", [128, 1152, 33024])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (128, 4), (250, 8)])
def test_attention_over_packed_keys_and_values(dim, group, capacity):
  batch, kv_heads = 3, 2
  keys = jax.random.split(jax.random.key(dim + capacity), 3)
  cache = kv_cache.init_cache(
    num_layers=LAYERS,
    batch=batch,
    num_kv_heads=kv_heads,
    head_dim=dim,
    capacity=capacity,
    codec=AutoFPCodec(),
  )
  shape = (batch, kv_heads, capacity, dim)
  cache = kv_cache.write(
    cache,
    jnp.asarray(LAYER),
    jnp.zeros((batch,), jnp.int32),
    jax.random.normal(keys[0], shape),
    jax.random.normal(keys[1], shape),
    jnp.asarray([4, 6, 6], jnp.int32),
  )
  queries = 2 * jax.random.normal(keys[2], (batch, kv_heads * group, dim))
  positions = jnp.asarray([0, capacity // 2 + 3, capacity - 1], jnp.int32)
  wanted = reference.attend(
    queries[:, None], *kv_cache.read(cache, LAYER), positions[:, None]
  )[:, 0]
  jnp.full((8, *shape), jnp.nan).block_until_ready()
  actual = attention.attend(
    queries,
    cache.planes["codes"],
    cache.planes["scales"],
    positions,
    jnp.asarray(LAYER),
  )
  np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-4)
