"""The GEMM at every mix of levels, against float64 and against itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax import formats
from autoematic_jax.errors import PrecisionError
from autoematic_jax.errors import QTensorError
from autoematic_jax.pallas_kernels.activation_quantization import PAPER
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import PREFILL_ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm import Gate
from autoematic_jax.pallas_kernels.extended_gemm import Norm
from autoematic_jax.pallas_kernels.extended_gemm import expand
from autoematic_jax.pallas_kernels.extended_gemm import extended_gemm

FORMATS = ("nvfp4", "autofp6", "autofp8", "fp6g")
DECODINGS = ("fixed", "exponent")
E2M1 = {0, 0.5, 1, 1.5, 2, 3, 4, 6}


def make(rng, m, n, k, fmt="autofp6", decoding="exponent"):
  w = rng.standard_t(4, (n, k)).astype(np.float32)
  x = (rng.standard_t(3, (m, k)) * rng.lognormal(0, 2, (m, 1))).astype(
    np.float32
  )
  weight = formats.quantize_weight(
    jnp.asarray(w), format=fmt, rho=0.2, decoding=decoding
  )
  return jnp.asarray(x), weight


def mixed_levels(weight, m):
  return np.resize(np.asarray(weight.levels, np.int32), m)


def float64_result(x, weight, levels, decoding, **activation):
  """(W at the row's level) . (A at the row's level), in float64.

  Where the masks are disjoint, the plain product of refined operands is what
  the extended-K form must give.
  """
  mask = None
  if weight.refinement_mask is not None:
    mask = formats.mask_bits(weight)
  rows = quantize_rows(
    x,
    jnp.asarray(levels),
    weight_mask=mask,
    config=ActivationConfig(decoding=decoding, **activation),
    element="e2m3" if weight.format == "fp6g" else "e2m1",
  )
  a = np.asarray(rows.values, np.float64) + np.asarray(rows.delta, np.float64)
  a *= np.repeat(np.asarray(rows.group_scale, np.float64), 16, axis=1)
  a *= np.asarray(rows.tensor_scale, np.float64)
  a = a[:, : weight.columns]
  out = np.empty((len(levels), weight.rows))
  for row, level in enumerate(levels):
    w = np.asarray(formats.dequantize(weight, int(level)), np.float64)
    out[row] = w @ a[row]
  return out


def assert_close(actual, expected):
  scale = np.abs(expected).max(axis=1, keepdims=True)
  np.testing.assert_allclose(
    np.asarray(actual, np.float64) / scale, expected / scale, atol=3e-6
  )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("k", [16, 60, 464])
def test_both_implementations_match_float64(fmt, decoding, k):
  rng = np.random.default_rng(k)
  x, weight = make(rng, 9, 40, k, fmt, decoding)
  levels = mixed_levels(weight, 9)
  expected = float64_result(x, weight, levels, decoding, overlapping=False)
  apart = ActivationConfig(decoding=decoding, overlapping=False)
  for form in (weight, expand([weight])):
    actual = extended_gemm(x, form, levels, activation=apart)
    assert_close(actual, expected)


@pytest.mark.parametrize("fmt", ["autofp6", "autofp8"])
def test_overlapping_masks_refine_both_operands(fmt):
  rng = np.random.default_rng(5)
  x, weight = make(rng, 9, 40, 464, fmt)
  levels = mixed_levels(weight, 9)
  expected = float64_result(x, weight, levels, "exponent")
  apart = float64_result(x, weight, levels, "exponent", overlapping=False)
  assert np.any(expected != apart)
  assert_close(extended_gemm(x, expand([weight]), levels), expected)
  assert_close(extended_gemm(x, weight, levels), apart)
  with pytest.raises(PrecisionError, match="masks cannot overlap"):
    extended_gemm(x, weight, levels, activation=ActivationConfig())


def test_any_base_comes_closer_than_the_nearest():
  x = np.random.default_rng(6).standard_normal((64, 512)).astype(np.float32)

  def error(**options):
    rows = quantize_rows(
      jnp.asarray(x),
      jnp.full((64,), 6),
      config=ActivationConfig(threshold=0.0, **options),
      present=(6,),
    )
    assert set(np.abs(np.unique(rows.values))) <= E2M1
    value = rows.scaled(rows.values + rows.delta) * rows.tensor_scale
    return np.square(np.asarray(value) - x)

  nearest, free = error(nearest_base=True), error()
  assert np.all(free <= nearest)
  assert free.mean() < 0.7 * nearest.mean()


def test_refinement_brings_the_product_closer():
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.standard_normal((64, 512)), jnp.float32)
  x = jnp.asarray(rng.standard_normal((16, 512)), jnp.float32)
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
  weight = expand([formats.quantize_weight(w, format="autofp8", rho=0.5)])
  errors = [
    np.linalg.norm(np.asarray(extended_gemm(x, weight, level)) - exact)
    for level in (2, 4, 6, 8)
  ]
  assert errors == sorted(errors, reverse=True)
  assert errors[3] < errors[2] < 0.8 * errors[1] < errors[1] < errors[0]


@pytest.mark.parametrize("row_tile", [None, 1, 4, PREFILL_ROW_TILE])
@pytest.mark.parametrize("fmt", ["autofp6", "autofp8"])
def test_row_does_not_depend_on_its_neighbours(row_tile, fmt):
  """`row_tile` None runs the reference."""
  rng = np.random.default_rng(7)
  x, weight = make(rng, 37, 48, 320, fmt)
  tile = {}
  if row_tile is not None:
    weight, tile = expand([weight]), {"row_tile": row_tile}
  levels = mixed_levels(weight, 37)
  rng.shuffle(levels)
  together = np.asarray(extended_gemm(x, weight, levels, **tile))
  for rows in ([0], [5], [36], [3, 4, 5], [20, 1, 7, 9, 30, 31]):
    rows = np.asarray(rows)
    alone = extended_gemm(x[rows], weight, levels[rows], **tile)
    np.testing.assert_array_equal(np.asarray(alone), together[rows])


@pytest.mark.parametrize("row_tile", [1, PREFILL_ROW_TILE])
def test_layer_of_a_stacked_weight(row_tile):
  rng = np.random.default_rng(11)
  x, first = make(rng, 5, 32, 64)
  _, second = make(rng, 5, 32, 64)
  weights = [expand([first]), expand([second])]
  stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)
  levels = mixed_levels(first, 5)
  for layer, weight in enumerate(weights):
    np.testing.assert_array_equal(
      extended_gemm(x, stacked, levels, layer=layer, row_tile=row_tile),
      extended_gemm(x, weight, levels, row_tile=row_tile),
    )


@pytest.mark.parametrize("kind", ["norm", "gate"])
def test_what_comes_before_is_done_first(kind):
  rng = np.random.default_rng(7)
  _, weight = make(rng, 1, 24, 48)
  stacked = jax.tree.map(lambda a: jnp.stack([a, a]), expand([weight]))
  x = jnp.asarray(rng.standard_normal((3, 48 if kind == "norm" else 96)))
  x = x.astype(jnp.float32)
  if kind == "gate":
    before = Gate()
    by_hand = x[:, :48] / (1 + jnp.exp(-x[:, :48])) * x[:, 48:]
  else:
    scale = jnp.asarray(rng.lognormal(0, 1, (2, 48)), jnp.float32)
    before = Norm(scale=scale, epsilon=1e-3)
    mean = jnp.mean(jnp.square(x), axis=1, keepdims=True)
    by_hand = x / jnp.sqrt(mean + 1e-3) * scale[1]
  np.testing.assert_allclose(before(x, jnp.asarray(1)), by_hand, rtol=1e-5)
  actual = extended_gemm(x, stacked, 6, layer=1, before=before)
  first = before(x, jnp.asarray(1))
  np.testing.assert_array_equal(
    actual, extended_gemm(first, stacked, 6, layer=1)
  )


def test_jitted_and_traced_levels_agree_with_eager():
  rng = np.random.default_rng(3)
  x, weight = make(rng, 6, 32, 128)
  weight = expand([weight])
  levels = jnp.asarray([2, 4, 6, 6, 4, 2], jnp.int32)
  eager = extended_gemm(x, weight, levels)
  jitted = jax.jit(extended_gemm)(x, weight, levels)
  np.testing.assert_array_equal(np.asarray(eager), np.asarray(jitted))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("packed", [True, False])
def test_non_finite_row_is_nan_and_alone(bad, packed):
  rng = np.random.default_rng(5)
  x, weight = make(rng, 5, 24, 64)
  weight = weight if packed else expand([weight])
  levels = jnp.asarray([6, 6, 4, 6, 2])
  clean = np.asarray(extended_gemm(x, weight, levels))
  out = np.asarray(extended_gemm(x.at[1, 3].set(bad), weight, levels))
  assert np.isnan(out[1]).all()
  keep = [0, 2, 3, 4]
  np.testing.assert_array_equal(out[keep], clean[keep])


def test_zero_rows_give_zeros():
  rng = np.random.default_rng(5)
  x, weight = make(rng, 3, 24, 64)
  out = extended_gemm(x.at[1].set(0.0), expand([weight]), 6)
  assert not np.asarray(out[1]).any()
  assert np.asarray(out[0]).any()


def test_joined_weights_equal_separate_ones():
  rng = np.random.default_rng(9)
  first = jnp.asarray(rng.standard_normal((24, 96)), jnp.float32)
  second = 50 * jnp.asarray(rng.standard_normal((8, 96)), jnp.float32)
  gain = sum(
    formats.refinement_gain(w, format="autofp6", decoding="exponent")
    for w in (first, second)
  )
  mask = formats.select_refinement_mask(
    gain, formats.refinement_budget(96, 0.2)
  )
  parts = [
    formats.quantize_weight(w, format="autofp6", refinement_mask=mask)
    for w in (first, second)
  ]
  x = jnp.asarray(rng.standard_normal((5, 96)), jnp.float32)
  levels = jnp.asarray([2, 4, 6, 6, 4])
  joined = np.asarray(extended_gemm(x, expand(parts), levels))
  separate = [extended_gemm(x, expand([p]), levels) for p in parts]
  np.testing.assert_allclose(
    joined, np.concatenate(separate, axis=1), rtol=1e-5, atol=1e-5
  )


def test_weights_that_refine_more_and_less_are_expanded_alike(compiled):
  """Loading compiles for the shapes of a model, not for each of its layers."""
  w = np.random.default_rng(0).standard_normal((24, 208))

  def run(rho):
    packed = formats.quantize_weight(
      jnp.asarray(w, jnp.float32), format="autofp6", rho=rho
    )
    return packed, compiled(lambda: expand([packed]))

  _, first = run(0.1)
  assert first
  packed, second = run(0.4)
  assert not second
  expanded = expand([packed])
  assert expanded.columns.shape == (4 * packed.refined,)
  assert expanded.refinement6.shape == (24, 4 * packed.refined)


def test_joining_different_masks_is_refused():
  rng = np.random.default_rng(9)
  parts = [make(rng, 1, 16, 256)[1] for _ in range(2)]
  with pytest.raises(QTensorError, match="refinement masks"):
    expand(parts)


def test_errors_name_the_numbers():
  rng = np.random.default_rng(1)
  x, weight = make(rng, 4, 16, 64, "nvfp4")
  with pytest.raises(PrecisionError, match=r"levels \[6\].*nvfp4.*\(2, 4\)"):
    extended_gemm(x, weight, 6)
  with pytest.raises(PrecisionError, match=r"\(4, 63\).*\[M, 64\]"):
    extended_gemm(x[:, :63], weight, 4)
  with pytest.raises(PrecisionError, match=r"shape \(3,\); need \[4\]"):
    extended_gemm(x, weight, np.asarray([4, 4, 4]))
  with pytest.raises(PrecisionError, match="xla.*does not take a QTensor"):
    extended_gemm(x, weight, 4, implementation="xla")


def test_activation_masks_avoid_the_weights_and_zero_subgroups():
  rng = np.random.default_rng(2)
  x, weight = make(rng, 32, 16, 256)
  x = x.at[:, 8:16].set(0.0)
  weight_mask = formats.mask_bits(weight)
  rows = quantize_rows(
    x, jnp.full((32,), 6), weight_mask=weight_mask, config=PAPER
  )
  mask = np.asarray(rows.mask)
  assert mask.any()
  assert not (mask & np.asarray(weight_mask)[None]).any()
  assert not mask[:, 2:4].any()
  outside = ~np.repeat(mask, 4, axis=1)
  assert not np.asarray(rows.delta)[outside].any()


def test_union_of_masks_serves_rows_that_refine_elsewhere():
  """Rows whose masks differ share one Wqr and keep their own results."""
  rng = np.random.default_rng(4)
  x, weight = make(rng, 8, 32, 128)
  rows = quantize_rows(
    x,
    jnp.full((8,), 6),
    weight_mask=formats.mask_bits(weight),
    config=PAPER,
  )
  masks = np.asarray(rows.mask)
  assert len(np.unique(masks, axis=0)) > 1
  paper = dataclasses.asdict(PAPER)
  expected = float64_result(x, weight, [6] * 8, **paper)
  assert_close(extended_gemm(x, weight, 6, activation=PAPER), expected)
