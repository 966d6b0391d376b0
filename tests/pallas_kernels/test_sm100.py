"""The Blackwell kernel's body on numpy, against the paper's form in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackwell import Blackwell
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from packed_weights import random_weight

from autoematic_jax import formats
from autoematic_jax.errors import PrecisionError
from autoematic_jax.errors import QTensorError
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import extended_gemm
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm100
from autoematic_jax.pallas_kernels.extended_gemm import pack_block_scaled
from autoematic_jax.pallas_kernels.extended_gemm import reference
from autoematic_jax.pallas_kernels.extended_gemm.sm100 import kernel
from autoematic_jax.pallas_kernels.extended_gemm.sm100.operands import (
  row_operands,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm100.plan import plan_of

pytestmark = pytest.mark.slow

EXACT_QUARTERS = (24, 127)
"""Bits of the scales from 1/16 on."""


jitted_quantize_rows = jax.jit(quantize_rows, static_argnames="config")
jitted_reference = jax.jit(reference.extended_gemm)


def quantized(x, weight, levels, **options):
  config = ActivationConfig(
    decoding=weight.decoding, overlapping=False, **options
  )
  return jitted_quantize_rows(
    jnp.asarray(x, jnp.float32),
    jnp.asarray(levels, jnp.int32),
    weight_mask=formats.mask_bits(formats.with_room(weight)),
    config=config,
  )


def expected_of(rows, weight):
  # With room, weights that refine more and less share a program.
  return jitted_reference(rows, formats.with_room(weight))


def on_numpy(rows, packed, layer=0, present=(4, 6), late=(True, True)):
  with Blackwell(*late).replaced_in(kernel):
    out = mosaic_sm100.multiply(
      rows, packed, jnp.asarray(layer), present=present
    )
  return np.asarray(out, np.float64)


def assert_close(actual, expected):
  expected = np.asarray(expected, np.float64)
  scale = np.abs(expected).max(axis=1, keepdims=True)
  scale[scale == 0] = 1
  np.testing.assert_allclose(actual / scale, expected / scale, atol=3e-6)


@settings(max_examples=20, deadline=None)
@given(
  seed=st.integers(0, 2**32 - 1),
  # Every shape is compiled for.
  shape=st.sampled_from([(1, 1, 16), (37, 130, 272), (20, 100, 1030)]),
  most=st.sampled_from([0, 1, 2]),
  decoding=st.sampled_from(["fixed", "exponent"]),
  mix=st.sampled_from([[4], [6], [4, 6], [4, 4, 4, 4, 4, 6]]),
  late=st.tuples(st.booleans(), st.booleans()),
)
def test_any_product_is_the_reference(seed, shape, most, decoding, mix, late):
  m, n, k = shape
  rng = np.random.default_rng(seed)
  weight = random_weight(
    rng, n, k, most=most, decoding=decoding, scales=EXACT_QUARTERS
  )
  x = rng.standard_t(2, (m, k)) * rng.lognormal(0, 3, (m, 1))
  rows = quantized(x, weight, np.resize(mix, m))
  packed = pack_block_scaled([[weight]])
  out = on_numpy(rows, packed, present=tuple(sorted(set(mix))), late=late)
  assert_close(out, expected_of(rows, weight))


@pytest.mark.parametrize("late", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_layers_tiles_and_bad_rows_keep_to_themselves(late):
  """Two tiles of rows, of which one is refined in other columns; deep loops."""
  rng = np.random.default_rng(1)
  layers = [
    random_weight(rng, 140, 2816, most=most, scales=EXACT_QUARTERS)
    for most in (2, 0, 1)
  ]
  packed = pack_block_scaled([[one] for one in layers])
  x = rng.standard_normal((130, 2816))
  x[7] = np.nan
  x[8] = 0
  levels = np.resize([4, 6, 4], 130)
  levels[128:] = 4
  for number, weight in enumerate(layers):
    rows = quantized(x, weight, levels)
    out = on_numpy(rows, packed, number, late=late)
    assert np.isnan(out[7]).all()
    expected = expected_of(rows, weight)
    assert_close(np.delete(out, 7, 0), np.delete(expected, 7, 0))


def test_every_scale_and_code_of_the_operands_counts():
  """One place of x and of the weight at a time; no sum can hide another."""
  rng = np.random.default_rng(2)
  k = 320
  weight = random_weight(rng, 129, k, scales=EXACT_QUARTERS)
  columns = rng.permutation(k)[:64]
  x = np.zeros((64, k))
  x[np.arange(64), columns] = rng.standard_normal(64)
  rows = quantized(x, weight, np.full(64, 6), threshold=0.0)
  packed = pack_block_scaled([[weight]])
  out = on_numpy(rows, packed)
  expected = np.asarray(expected_of(rows, weight))
  np.testing.assert_array_equal(out.astype(np.float32), expected)


def test_small_scales_are_lifted_and_those_that_cannot_be_are_refused():
  rng = np.random.default_rng(3)
  tiny = random_weight(rng, 20, 96, scales=(1, 40))
  rows = quantized(rng.standard_normal((5, 96)), tiny, np.full(5, 6))
  out = on_numpy(rows, pack_block_scaled([[tiny]]))
  assert_close(out, expected_of(rows, tiny))
  scale = np.asarray(tiny.group_scale).copy()
  scale[3, :2] = [0.01171875, 128]
  both = dataclasses.replace(tiny, group_scale=jnp.asarray(scale))
  with pytest.raises(QTensorError, match="1 of 20 outputs.*128.*0.0625"):
    pack_block_scaled([[both]])


def test_only_steps_that_refine_something_run():
  rng = np.random.default_rng(4)
  k = 2048
  weight = random_weight(rng, 16, k, scales=EXACT_QUARTERS)
  mask = np.zeros(k // 4, bool)
  mask[[3, 400]] = True
  weight = dataclasses.replace(
    weight,
    refinement_mask=formats.pack_mask(jnp.asarray(mask)),
    offsets=weight.offsets[:, :2],
  )
  packed = pack_block_scaled([[weight]])
  assert packed.stored_tiles == 1
  assert packed.codes.shape == (1, 128, k // 2 + 128)

  def quantized_at(levels, **options):
    x = rng.standard_normal((len(levels), k))
    return quantized(x, weight, levels, **options)

  def counts(levels, **options):
    rows = quantized_at(levels, **options)
    plan = plan_of(packed, len(levels))
    cut = row_operands(rows, packed.mask[0], packed.order[0], plan, refine=True)
    return cut.counts.tolist()

  nothing = {"threshold": 0.9}
  assert counts([4] * 129) == [8, 8]
  assert counts([4] * 128 + [6], **nothing) == [8, 9]
  assert counts([6] + [4] * 128, threshold=0.0) == [16, 8]
  rows = quantized_at([4, 6], **nothing)
  assert_close(on_numpy(rows, packed), expected_of(rows, weight))


def test_a_weight_without_offsets_has_one_pass():
  rng = np.random.default_rng(5)
  w = jnp.asarray(rng.standard_normal((40, 300)), jnp.float32)
  weights = [formats.quantize_weight(w * s, format="nvfp4") for s in (1, 5)]
  packed = pack_block_scaled([weights])
  assert packed.levels == (4,)
  assert packed.codes.shape == (1, 128, 256)
  rows = quantized(rng.standard_normal((3, 300)), weights[0], [4, 4, 4])
  out = on_numpy(rows, packed, present=(4,))
  assert out.shape == (3, 80)
  for part, weight in zip(np.split(out, 2, axis=1), weights, strict=True):
    assert_close(part, expected_of(rows, weight))


@pytest.mark.parametrize("m", [1, 16, 17, 100, 128, 1000])
def test_every_plan_fits_shared_memory_and_covers_the_rows(m):
  weight = random_weight(np.random.default_rng(6), 1, 16, scales=EXACT_QUARTERS)
  plan = plan_of(pack_block_scaled([[weight]]), m)
  assert plan.row_tiles * plan.rows >= m
  assert plan.rows in (16, 32, 64, 128)
  assert plan.depth >= 3


def test_what_does_not_run_here_says_so():
  weight = random_weight(np.random.default_rng(0), 16, 64, scales=(24, 127))
  packed = pack_block_scaled([[weight]])
  x = jnp.zeros((2, 64))
  for implementation in (None, "mosaic_sm100"):
    with pytest.raises(PrecisionError, match="Blackwell.*cpu.*'xla'"):
      extended_gemm(x, packed, 4, implementation=implementation)
  with pytest.raises(PrecisionError, match="pack_block_scaled"):
    extended_gemm(x, weight, 4, implementation="mosaic_sm100")
  with pytest.raises(PrecisionError, match="sm100.*masks cannot overlap"):
    extended_gemm(x, packed, 6, activation=ActivationConfig())
  with pytest.raises(PrecisionError, match=r"levels \[2\]"):
    extended_gemm(x, packed, 2)
  with pytest.raises(QTensorError, match="fp6g has no form"):
    pack_block_scaled(
      [[formats.quantize_weight(jnp.ones((2, 16)), format="fp6g")]]
    )
