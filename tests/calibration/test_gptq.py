"""GPTQ against its definition, and against rounding."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax import formats
from autoematic_jax.calibration import SCALE_TARGETS
from autoematic_jax.calibration import GptqOptions
from autoematic_jax.calibration import gptq
from autoematic_jax.calibration import hessian

FORMATS = ["nvfp4", "fp6g", "autofp6", "autofp8"]


def problem(rows=24, columns=64, seed=0):
  """Weights, and the Hessian of inputs that are correlated."""
  rng = np.random.default_rng(seed)
  mix = rng.standard_normal((columns, columns)) / np.sqrt(columns)
  x = rng.standard_normal((4 * columns, columns)) @ mix
  x *= np.exp(rng.standard_normal(columns))
  w = rng.standard_normal((rows, columns)).astype(np.float32)
  return w, x.T @ x / len(x)


def factor_of(h):
  found = hessian.factor(h)
  assert found is not None
  return found


def loss(tensor, w, h, level=None):
  error = np.asarray(formats.dequantize(tensor, level), np.float64) - w
  return np.einsum("nk,kl,nl->", error, h, error)


@pytest.mark.parametrize("columns", [32, 60])
def test_factor_is_that_of_the_damped_inverse(columns):
  _, h = problem(columns=columns)
  found = factor_of(h)
  damped = h + 0.01 * h.diagonal().mean() * np.eye(columns)
  upper = found.upper.astype(np.float64)
  np.testing.assert_array_equal(upper, np.triu(upper))
  np.testing.assert_allclose(
    upper.T @ upper @ damped, np.eye(columns), atol=1e-4
  )
  np.testing.assert_array_equal(found.diagonal, h.diagonal())
  assert found.damping == 0.01


def test_damping_rises_until_the_factor_exists():
  _, h = problem(columns=32)
  h -= 0.05 * h.diagonal().mean() * np.eye(32)
  smallest = np.linalg.eigvalsh(h)[0]
  assert smallest < -0.01 * h.diagonal().mean()
  found = factor_of(h)
  assert found.damping == pytest.approx(0.1)
  h[0, 0] = np.nan
  assert hessian.factor(h) is None


@pytest.mark.parametrize("fmt", FORMATS)
def test_it_loses_less_than_rounding(fmt):
  w, h = problem()
  for targets, share in (((1.0,), 0.9), (SCALE_TARGETS, 0.7)):
    options = GptqOptions(format=fmt, scale_targets=targets)
    tensor = gptq.quantize_jointly([w], factor_of(h), options)[0]
    formats.validate_qtensor(tensor)
    rounded = formats.quantize_weight(w, format=fmt)
    assert loss(tensor, w, h) < share * loss(rounded, w, h)


@pytest.mark.parametrize("fmt", FORMATS)
def test_inputs_without_correlation_leave_rounding(fmt):
  """A diagonal Hessian has nothing to make good."""
  w, _ = problem()
  importance = np.exp(np.random.default_rng(1).standard_normal(64))
  options = GptqOptions(format=fmt, scale_targets=(1.0,))
  tensor = gptq.quantize_jointly([w], factor_of(np.diag(importance)), options)[
    0
  ]
  mask = None
  if fmt in ("autofp6", "autofp8"):
    gain = formats.refinement_gain(
      w, format=fmt, decoding="exponent", importance=importance
    )
    mask = formats.select_refinement_mask(
      gain, formats.refinement_budget(64, 0.2)
    )
  rounded = formats.quantize_weight(w, format=fmt, refinement_mask=mask)
  for level in rounded.levels:
    np.testing.assert_array_equal(
      formats.dequantize(tensor, level), formats.dequantize(rounded, level)
    )


def test_it_is_the_algorithm_written_out():
  """Loops in float64, one scale, no choice of the mask left open."""
  w, h = problem(rows=6, columns=48)
  options = GptqOptions(
    format="autofp6", rho=0.5, scale_targets=(1.0,), sweeps=0
  )
  factor = factor_of(h)
  tensor = gptq.quantize_jointly([w], factor, options)[0]
  mask = np.repeat(np.asarray(formats.mask_bits(tensor)), 4)
  upper = factor.upper.astype(np.float64)
  scale = float(tensor.tensor_scale)
  rest, expected = w.astype(np.float64), np.zeros_like(w, np.float64)
  for start in range(0, 48, 16):
    group = rest[:, start : start + 16].astype(np.float32)
    b = formats.group_scale(
      jnp.asarray(group), jnp.float32(scale), minimum=2.0**-4
    )
    unit = np.asarray(b, np.float64) * scale
    for k in range(start, start + 16):
      scaled = (rest[:, k : k + 1] / unit).astype(np.float32)
      value = formats.round_e2m1(jnp.asarray(scaled))
      d = formats.offset(jnp.asarray(scaled), value, "exponent")
      delta = formats.offset_delta(d, value, "exponent")
      value = np.asarray(value, np.float64) + mask[k] * np.asarray(delta)
      expected[:, k : k + 1] = value * unit
      error = (rest[:, k : k + 1] - expected[:, k : k + 1]) / upper[k, k]
      rest[:, k + 1 :] -= error * upper[k, k + 1 :]
  actual = np.asarray(formats.dequantize(tensor, 6), np.float64)
  # A value that lies on an edge may round the other way in float32, and what
  # follows in its row then differs too.
  same = np.isclose(actual, expected, rtol=1e-6, atol=0).all(axis=1)
  assert same.sum() >= 5


def test_matrices_with_one_input_share_a_mask_and_keep_their_scale():
  w, h = problem(rows=40, columns=60)
  parts = [w[:8], 100 * w[8:]]
  options = GptqOptions(format="autofp6")
  tensors = gptq.quantize_jointly(parts, factor_of(h), options)
  masks = [np.asarray(formats.mask_bits(tensor)) for tensor in tensors]
  np.testing.assert_array_equal(*masks)
  assert masks[0].sum() == formats.refinement_budget(60, 0.2)
  assert masks[0].reshape(-1, 4).sum(1).max() <= 2
  for tensor, part in zip(tensors, parts, strict=True):
    formats.validate_qtensor(tensor)
    assert tensor.columns == 60
    assert loss(tensor, part, h) < 0.02 * np.einsum("nk,kl,nl->", part, h, part)


def test_a_channel_that_no_input_reached_is_rounded_as_it_is():
  w, h = problem()
  h[5], h[:, 5] = 0, 0
  options = GptqOptions(format="nvfp4", scale_targets=(1.0,))
  tensor = gptq.quantize_jointly([w], factor_of(h), options)[0]
  unit = np.asarray(formats.decode_e4m3(tensor.group_scale))[:, :1]
  unit = unit * float(tensor.tensor_scale)
  expected = formats.round_e2m1(jnp.asarray(w[:, 5:6] / unit)) * unit
  np.testing.assert_allclose(
    formats.dequantize(tensor)[:, 5:6], expected, rtol=1e-6
  )


def test_corrected_weights_are_the_least_squares_solution():
  rng = np.random.default_rng(3)
  exact = rng.standard_normal((500, 32)).astype(np.float32)
  own = exact + 0.3 * rng.standard_normal((500, 32)).astype(np.float32)
  w = rng.standard_normal((9, 32)).astype(np.float32)
  moments = hessian.Moments(32)
  for rows in (slice(0, 200), slice(200, 500)):
    moments.add(jnp.asarray(own[rows]), jnp.asarray(exact[rows]))
  given = [w[:4], w[4:]], moments.hessian, moments.cross
  first, second = hessian.corrected(*given, 1e-9)
  best, *_ = np.linalg.lstsq(own.astype(np.float64), exact @ w.T, rcond=None)
  np.testing.assert_allclose(np.concatenate([first, second]), best.T, atol=1e-4)
  held, _ = hessian.corrected(*given, 1e9)
  np.testing.assert_allclose(held, w[:4], atol=1e-5)


def test_scale_and_mask_are_chosen_for_each_other():
  """With half of a group refined, its best scale is another."""
  w, h = problem()
  options = GptqOptions(format="autofp6", rho=0.5)
  tensor = gptq.quantize_jointly([w], factor_of(h), options)[0]
  plain = gptq.quantize_jointly([w], factor_of(h), GptqOptions(format="nvfp4"))[
    0
  ]
  assert np.any(np.asarray(tensor.group_scale) != np.asarray(plain.group_scale))
  assert loss(tensor, w, h) < 0.5 * loss(plain, w, h)


def test_moments_of_many_batches_stay_exact():
  rng = np.random.default_rng(4)
  moments, expected = hessian.Moments(3), np.zeros((3, 3))
  # After the first batch, each other is lost to float32 on its own.
  batches = [np.full((1, 3), 4096.0), *rng.uniform(0.1, 1, (500, 1, 3))]
  for batch in batches:
    x = batch.astype(np.float32)
    moments.add(jnp.asarray(x), jnp.asarray(x))
    expected += x.T.astype(np.float64) @ x
  expected /= len(batches)
  np.testing.assert_allclose(moments.hessian, expected, rtol=1e-9)
  np.testing.assert_allclose(moments.cross, expected, rtol=1e-9)
