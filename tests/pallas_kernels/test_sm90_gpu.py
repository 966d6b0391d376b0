"""The Hopper kernels on a Hopper GPU, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_weights import random_weight

from autoematic_jax import formats
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import Gate
from autoematic_jax.pallas_kernels.extended_gemm import Norm
from autoematic_jax.pallas_kernels.extended_gemm import extended_gemm
from autoematic_jax.pallas_kernels.extended_gemm import prepack
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import permute_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

SHAPES = ((512, 1024), (1000, 1120), (4096, 512), (33, 80), (6208, 2048))
MIXES = ((4,), (6,), (4, 6))


def stack(n, k, fmt="autofp6", most=(2, 0, 1)):
  """Layers that refine different numbers of subgroups."""
  rng = np.random.default_rng(n + k)
  layers = [[random_weight(rng, n, k, most=m)] for m in most]
  if fmt == "nvfp4":
    layers = [[as_nvfp4(layer[0])] for layer in layers]
  return layers


def as_nvfp4(weight):
  return dataclasses.replace(
    weight, format="nvfp4", refinement_mask=None, offsets=None
  )


def rows_of(m, k):
  """Heavy tails, a row of zeros, one with NaN, one with Inf."""
  rng = np.random.default_rng(m)
  x = rng.standard_t(2, (m, k)) * rng.lognormal(0, 3, (m, 1))
  if m > 4:
    x[1], x[2, k // 2], x[3, 0] = 0, np.nan, np.inf
  return jnp.asarray(x, jnp.float32)


def expected(x, layer, levels, present):
  """The product of quantized rows and decoded weight, in float64."""
  rows = quantize_rows(
    x,
    jnp.asarray(levels),
    weight_mask=formats.mask_bits(layer),
    config=ActivationConfig(decoding=layer.decoding),
    present=present,
  )
  a = rows.scaled(rows.values + rows.delta) * rows.tensor_scale
  a = np.asarray(a, np.float64)[:, : layer.columns]
  out = np.empty((len(x), layer.rows))
  for level in set(levels.tolist()):
    w = np.asarray(formats.dequantize(layer, level), np.float64)
    with np.errstate(invalid="ignore"):
      out[levels == level] = a[levels == level] @ w.T
  return out


def assert_right(actual, wanted):
  actual = np.asarray(actual)
  np.testing.assert_array_equal(np.isnan(actual), np.isnan(wanted))
  scale = np.nanmax(np.abs(wanted), axis=1, keepdims=True, initial=1e-30)
  np.testing.assert_allclose(
    np.nan_to_num(actual / scale), np.nan_to_num(wanted / scale), atol=3e-5
  )


def poison(m, n):
  """Leaves NaN in the memory that the next results get."""
  jnp.full((8, m, n), jnp.nan).block_until_ready()


def before_of(kind, k):
  if kind == "norm":
    scale = np.random.default_rng(k).lognormal(0, 1, (3, k))
    return Norm(scale=jnp.asarray(scale, jnp.float32), epsilon=1e-5)
  return {"gate": Gate(), "nothing": None}[kind]


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("k", [80, 4096])
@pytest.mark.parametrize("kind", ["nothing", "norm", "gate"])
def test_quantized_rows_in_order(kind, k, m):
  weight, layer = prepack(stack(64, k)), jnp.asarray(2)
  x = rows_of(m, k) if kind == "nothing" else jnp.clip(rows_of(m, k), -30, 30)
  if kind == "gate":
    x = jnp.concatenate([x, rows_of(m, k)], axis=1)
  before = before_of(kind, k)
  levels = jnp.asarray(np.resize([6, 4, 6], m), jnp.int32)
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.extended_gemm.sm90 import quantize

  values, scale = quantize.quantize_in_order(
    x,
    levels,
    weight.sources,
    layer,
    config=ActivationConfig(),
    refine=True,
    before=before,
  )
  x = x if before is None else before(x, layer)
  rows = quantize_rows(x, levels, config=ActivationConfig(), present=(4, 6))
  wanted = rows.scaled(rows.values + rows.delta).astype(jnp.float16)
  wanted = np.asarray(permute_rows(wanted, weight.sources[2]), np.float32)
  wanted_scale = np.asarray(rows.tensor_scale[:, 0])
  np.testing.assert_allclose(scale, wanted_scale, rtol=1e-6)
  if kind == "nothing":
    np.testing.assert_array_equal(scale, wanted_scale)
  whole = np.isfinite(wanted_scale)
  assert whole.sum() >= m - 2
  # What lies at the middle between two values, or beside the threshold, may
  # be rounded to the other side.
  equal = np.asarray(values, np.float32)[whole] == wanted[whole]
  assert equal.mean() >= 0.995


@pytest.mark.parametrize("levels", [[4], [6], [4, 6], [6, 6, 4]])
@pytest.mark.parametrize("m", [1, 5, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_levels_that_only_the_device_knows(shape, m, levels):
  n, k = shape
  layers = stack(n, k)
  weight = prepack(layers)
  x, levels = rows_of(m, k), np.resize(levels, m).astype(np.int32)

  @jax.jit
  def run(x, levels):
    return extended_gemm(x, weight, levels, present=(4, 6), layer=1)

  for row in {0, m - 1}:
    poison(m, n)
    at = np.roll(levels, row)
    alone = tuple(sorted(set(at.tolist())))
    known = extended_gemm(x, weight, at, present=alone, layer=1)
    np.testing.assert_array_equal(run(x, at), known)


@pytest.mark.parametrize("present", MIXES)
@pytest.mark.parametrize("m", [1, 5, 16, 17, 64, 65, 129])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_at_every_mix_of_levels(shape, m, present):
  n, k = shape
  layers = stack(n, k)
  weight = prepack(layers, max_rows=16 if m <= 16 else 64)
  x, levels = rows_of(m, k), np.resize(present, m).astype(np.int32)
  for number, (layer,) in enumerate(layers):
    poison(m, n)
    out = extended_gemm(
      x, weight, levels, present=present, layer=jnp.asarray(number)
    )
    assert_right(out, expected(x, layer, levels, present))


@pytest.mark.parametrize("present", MIXES)
@pytest.mark.parametrize("max_rows", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_rows_from_any_packing(shape, max_rows, present):
  """So many that the layer is decoded before it is multiplied."""
  n, k = shape
  layers = stack(n, k)
  weight = prepack(layers, max_rows=max_rows)
  m = 520
  x, levels = rows_of(m, k), np.resize(present, m).astype(np.int32)
  for number, (layer,) in enumerate(layers):
    poison(1, n * k // 16)
    out = extended_gemm(
      x, weight, levels, present=present, layer=jnp.asarray(number)
    )
    assert_right(out, expected(x, layer, levels, present))


@pytest.mark.parametrize("m", [3, 16, 64, 200, 520])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_without_offsets(shape, m):
  n, k = shape
  layers = stack(n, k, "nvfp4")
  weight = prepack(layers, max_rows=16 if m <= 16 else 64)
  assert weight.offsets is None
  x, levels = rows_of(m, k), np.full(m, 4, np.int32)
  for number, (layer,) in enumerate(layers):
    poison(m, n)
    out = extended_gemm(x, weight, levels, layer=number)
    assert_right(out, expected(x, layer, levels, (4,)))


@pytest.mark.parametrize("max_rows", [16, 64])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_bits_of_a_row_depend_on_no_other(shape, max_rows):
  n, k = shape
  weight = prepack(stack(n, k), max_rows=max_rows)
  x = rows_of(max_rows, k)
  levels = np.resize([4, 6, 6], max_rows).astype(np.int32)
  layer = jnp.asarray(0)

  def run(rows, levels, present=(4, 6)):
    return np.asarray(
      extended_gemm(x[rows], weight, levels, present=present, layer=layer)
    )

  whole = run(slice(None), levels)
  for count in (1, 7, max_rows - 3):
    part = run(slice(-count, None), levels[-count:])
    np.testing.assert_array_equal(part, whole[-count:])
  # Other levels beside it, in the kernel that allows for both.
  six = run(slice(None), np.full(max_rows, 6, np.int32))
  np.testing.assert_array_equal(six[levels == 6], whole[levels == 6])


def test_tensors_joined_along_outputs_keep_their_scales():
  layers = stack(512, 1024, most=(2,))
  first = as_nvfp4(layers[0][0])
  scaled = dataclasses.replace(first, tensor_scale=8 * first.tensor_scale)
  weight = prepack([[first, scaled]])
  out = np.asarray(extended_gemm(rows_of(4, 1024), weight, 4))
  np.testing.assert_array_equal(out[:, 512:], 8 * out[:, :512])
