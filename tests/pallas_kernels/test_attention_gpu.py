"""The decode attention kernel on a Hopper GPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from packed_cache import LAYER
from packed_cache import LAYERS
from packed_cache import filled

from autoematic_jax.models import attention as reference
from autoematic_jax.pallas_kernels import attention
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm import rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("capacity", [128, 1152, 33024])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (128, 4), (248, 8)])
def test_attention_over_packed_keys_and_values(dim, group, capacity):
  batch, kv_heads = 3, 2
  rng = np.random.default_rng(dim + capacity)
  cache = filled(rng, batch, kv_heads, capacity, dim)
  queries = rng.standard_normal((batch, kv_heads * group, dim))
  queries = jnp.asarray(2 * queries, jnp.float32)
  positions = jnp.asarray([0, capacity // 2 + 3, capacity - 1], jnp.int32)
  wanted = reference.attend(
    queries[:, None],
    *cache.read(jnp.asarray(LAYER)),
    positions[:, None],
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


@pytest.mark.parametrize(("dim", "group", "batch"), [(64, 3, 1), (128, 4, 5)])
def test_a_step_stores_the_new_key_and_value_and_attends(dim, group, batch):
  kv_heads, capacity = 2, 256
  rng = np.random.default_rng(dim)
  cache = filled(rng, batch, kv_heads, capacity, dim)
  heads = [kv_heads * group, kv_heads, kv_heads]
  joined = rng.standard_normal((batch, sum(heads), dim)).astype(np.float32)
  positions = jnp.asarray(np.linspace(255, 0, batch), jnp.int32)
  levels = jnp.asarray(np.resize([6, 4], batch), jnp.int32)
  scales = rng.lognormal(0, 1, (2, LAYERS, dim)).astype(np.float32)
  norms = attention.HeadNorms(
    query=jnp.asarray(scales[0]), key=jnp.asarray(scales[1]), epsilon=1e-6
  )
  frequencies = 1e4 ** -(np.arange(0, dim, 2) / dim).astype(np.float32)
  rope = reference.rope_tables(positions[:, None], frequencies)
  layer = jnp.asarray(LAYER)

  of_head = np.repeat(scales[:, LAYER], heads[:2], axis=0)
  turned = jnp.asarray(joined[:, : sum(heads[:2])])
  turned = rms_norm(turned, jnp.asarray(of_head), 1e-6)
  turned = reference.apply_rope(turned[:, None], rope)[:, 0]
  queries, keys = jnp.split(turned, [heads[0]], axis=1)
  stored = cache.write(
    layer,
    positions,
    keys[:, :, None],
    jnp.asarray(joined[:, sum(heads[:2]) :, None]),
    levels,
  )
  wanted = reference.attend(
    queries[:, None], *stored.read(layer), positions[:, None]
  )

  out, codes, scales = attention.step(
    jnp.asarray(joined.reshape(batch, -1)),
    tuple(table[:, 0] for table in rope),
    norms,
    cache.planes["codes"],
    cache.planes["scales"],
    positions,
    levels,
    layer,
    config=ActivationConfig(),
  )
  # A key's last bit may take an element to the other side of a middle.
  for name, plane in (("codes", codes), ("scales", scales)):
    assert (plane == stored.planes[name]).mean() > 0.9999
  np.testing.assert_allclose(
    out, wanted.reshape(batch, -1), rtol=5e-3, atol=5e-3
  )
