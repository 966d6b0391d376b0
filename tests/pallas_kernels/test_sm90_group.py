"""The quantizing kernel's arithmetic against `quantize_rows`, on arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import group


def rows_of(rng, m, k):
  x = rng.standard_t(2, (m, k)) * rng.lognormal(0, 3, (m, 1))
  x[1], x[2, :32], x[3, k // 2], x[4, 0] = 0, 0, np.nan, np.inf
  x[5] *= 1e-30
  x[6, 0] = 1e6
  x[7] = np.round(2 * x[7])
  return jnp.asarray(x, jnp.float32)


def by_subgroup(x, levels, config, refine):
  """What the kernel's threads do, all at once."""
  rows = x.shape[0]
  planes = list(jnp.moveaxis(x.reshape(rows, -1, 4), 2, 0))
  amax = group.largest_magnitude(*planes)
  scale = group.tensor_scale(jnp.max(amax, axis=1))
  amax = jnp.repeat(jnp.max(amax.reshape(rows, -1, 4), axis=2), 4, axis=1)
  six = None
  if refine:
    six = jnp.broadcast_to((levels >= 6)[:, None], amax.shape)
  # As whole arrays, so that XLA divides rather than multiplies.
  tensor_scale = jnp.broadcast_to(scale[:, None], amax.shape)
  values = group.quantized(planes, amax, tensor_scale, six, config)
  return jnp.stack(values, axis=2).reshape(x.shape), scale


@pytest.mark.parametrize(
  "config",
  [
    ActivationConfig(),
    ActivationConfig(threshold=0.003, nearest_base=True),
    ActivationConfig(threshold=0.0, decoding="fixed"),
  ],
)
@pytest.mark.parametrize("levels", [[4], [6], [4, 6]])
@pytest.mark.parametrize("k", [64, 1120])
def test_bits_are_those_of_quantize_rows(k, levels, config):
  x = rows_of(np.random.default_rng(k), 12, k)
  levels = jnp.asarray(np.resize(levels, 12), jnp.int32)
  present = tuple(np.unique(levels).tolist())
  with jax.disable_jit():
    values, scale = by_subgroup(x, levels, config, 6 in present)
  rows = quantize_rows(x, levels, config=config, present=present)
  np.testing.assert_array_equal(scale, rows.tensor_scale[:, 0])
  whole = np.isfinite(np.asarray(scale))
  wanted = rows.scaled(rows.values + rows.delta)
  np.testing.assert_array_equal(values[whole], wanted[whole])
  assert whole.sum() == 10
