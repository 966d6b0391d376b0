"""The decode attention kernel on a Hopper GPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from packed_cache import LAYER
from packed_cache import filled

from autoematic_jax.models import attention as reference
from autoematic_jax.pallas_kernels import attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("capacity", [128, 1152, 33024])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (128, 4), (250, 8)])
def test_attention_over_packed_keys_and_values(dim, group, capacity):
  batch, kv_heads = 3, 2
  rng = np.random.default_rng(dim + capacity)
  cache = filled(rng, batch, kv_heads, capacity, dim)
  queries = rng.standard_normal((batch, kv_heads * group, dim))
  queries = jnp.asarray(2 * queries, jnp.float32)
  positions = jnp.asarray([0, capacity // 2 + 3, capacity - 1], jnp.int32)
  wanted = reference.attend(
    queries[:, None], *cache.read(LAYER), positions[:, None]
  )[:, 0]
  jnp.full((8, batch, kv_heads, capacity, dim), jnp.nan).block_until_ready()
  actual = attention.attend(
    queries,
    cache.planes["codes"],
    cache.planes["scales"],
    positions,
    jnp.asarray(LAYER),
  )
  np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-4)
