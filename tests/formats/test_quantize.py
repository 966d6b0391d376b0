import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from formats import numpy_reference as reference

from autoematic_jax import formats
from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import NonFiniteError
from autoematic_jax.errors import QTensorError

FORMATS = ("nvfp4", "fp6g", "autofp6", "autofp8")
DECODINGS = ("fixed", "exponent")


def weights(rows=16, columns=96, seed=0):
  """Most tests share one shape, and so what was compiled for it."""
  rng = np.random.default_rng(seed)
  spread = rng.lognormal(0, 1, (rows, columns))
  return jnp.asarray(rng.standard_normal((rows, columns)) * spread, "float32")


def largest(format):
  return 7.5 if format == "fp6g" else 6.0


def element_table(format):
  return reference.E2M3 if format == "fp6g" else reference.E2M1


def base_of(w, format):
  return reference.quantize(
    w, largest=largest(format), table=element_table(format)
  )


def assert_same(actual, expected):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_golden_nvfp4_tensor(golden):
  case = golden["nvfp4_tensor"]
  x = jnp.asarray(case["x"], jnp.float32)
  for format in ("nvfp4", "autofp6", "autofp8"):
    q = formats.quantize_weight(x, format=format)
    assert q.tensor_scale == np.float32(case["T"])
    np.testing.assert_array_equal(
      formats.decode_e4m3(q.group_scale), np.float32(case["B"])
    )
    np.testing.assert_array_equal(formats.decode_base(q), np.float32(case["q"]))
    np.testing.assert_array_equal(q.codes, np.uint8(case["packed"]))


@pytest.mark.parametrize(
  ("format", "columns"),
  [(format, 60) for format in FORMATS]
  + [("autofp6", columns) for columns in (1, 17, 464)],
)
def test_every_field_agrees_with_float64(format, columns):
  w = weights(9, columns, seed=columns)
  q = formats.quantize_weight(w, format=format, rho=0.4, decoding="exponent")
  formats.validate_qtensor(q)
  scaled, base, scale = base_of(w, format)
  np.testing.assert_array_equal(formats.decode_base(q), base)
  actual = np.repeat(np.float64(formats.decode_e4m3(q.group_scale)), 16, 1)
  np.testing.assert_array_equal(actual * np.float64(q.tensor_scale), scale)
  if q.offsets is None:
    assert format in ("nvfp4", "fp6g")
    return
  bits = q.levels[-1]
  d = reference.best_offset(scaled, base, "exponent", bits)
  delta = d * reference.step(base, "exponent", bits)
  columns = np.asarray(formats.refined_columns(q))
  np.testing.assert_array_equal(
    formats.decode_offsets(q, bits), delta[:, columns]
  )
  error = ((scaled - base) ** 2 - (scaled - base - delta) ** 2) * scale**2
  gain = error.reshape(9, -1, 4).sum(axis=(0, 2))
  actual = formats.refinement_gain(w, format=format, decoding="exponent")
  np.testing.assert_allclose(actual, gain, rtol=1e-4)


@pytest.mark.parametrize("format", ["fp6g", "autofp6", "autofp8"])
def test_compiled_and_eager_agree_to_the_bit(format):
  w = weights()
  mask = np.arange(24) % 3 == 0
  compiled = formats.quantize_weight(w, format=format, refinement_mask=mask)
  values = formats.dequantize(compiled)
  with jax.disable_jit():
    eager = formats.quantize_weight(w, format=format, refinement_mask=mask)
    np.testing.assert_array_equal(values, formats.dequantize(eager))
  assert_same(compiled, eager)


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_and_decoding_in_one_program_still_rounds(format):
  w = weights()
  mask = np.arange(24) % 3 == 0

  def round_trip(w):
    q = formats.quantize_weight(w, format=format, refinement_mask=mask)
    return formats.dequantize(q)

  np.testing.assert_array_equal(jax.jit(round_trip)(w), round_trip(w))


def half_gap(scaled, table):
  """Half the distance of the two values of a table around each element."""
  high = np.clip(np.searchsorted(table, np.abs(scaled)), 1, len(table) - 1)
  return (table[high] - table[high - 1]) / 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", FORMATS)
def test_error_of_the_base_is_within_half_a_gap(format, seed):
  w = weights(seed=seed)
  scaled, _, scale = base_of(w, format)
  q = formats.quantize_weight(w, format=format)
  level = 6 if format == "fp6g" else 4
  error = np.abs(np.float64(formats.dequantize(q, level)) - np.float64(w))
  # A group scale that rounds down, by at most 1/17, lets its largest element
  # saturate.
  bound = np.maximum(
    half_gap(scaled, element_table(format)), np.abs(scaled) - largest(format)
  )
  assert (error <= bound * scale * (1 + 1e-5)).all()
  assert (np.abs(scaled) <= largest(format) * 17 / 16 * (1 + 1e-5)).all()


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("format", ["autofp6", "autofp8"])
def test_refinement_never_harms_an_element_and_bounds_its_error(
  format, decoding
):
  w = weights()
  q = formats.quantize_weight(
    w, format=format, decoding=decoding, refinement_mask=np.ones(24, bool)
  )
  scaled, base, scale = base_of(w, format)
  error = {
    level: np.abs(np.float64(formats.dequantize(q, level)) - np.float64(w))
    for level in q.levels
  }
  slack = scale * 1e-5
  # Six bits of an eight-bit offset round it, at worst by half a six-bit step.
  rounded = reference.step(base, decoding, 8) * scale
  if format == "autofp6":
    assert (error[6] <= error[4] + slack).all()
  else:
    assert (error[6] <= error[4] + rounded + slack).all()
    assert (error[8] <= error[6] + slack).all()
    assert (error[8] <= error[4] + slack).all()
  if decoding == "exponent":
    # The offset above the highest is missing: up to a whole step there.
    step = reference.step(base, decoding, q.levels[-1])
    inside = np.abs(scaled) <= 6
    bound = step * scale + slack
    assert (error[q.levels[-1]] <= bound)[inside].all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("exponent", [-80, 100])
def test_a_power_of_two_changes_only_the_tensor_scale(format, exponent):
  w = weights()
  factor = np.float32(2.0**exponent)
  expected = formats.quantize_weight(w, format=format)
  actual = formats.quantize_weight(w * factor, format=format)
  assert_same(
    actual,
    dataclasses.replace(expected, tensor_scale=expected.tensor_scale * factor),
  )
  np.testing.assert_array_equal(
    formats.dequantize(actual), formats.dequantize(expected) * factor
  )


@pytest.mark.parametrize("format", FORMATS)
def test_weights_at_the_ends_of_float32_stay_finite(format):
  for scale in (3e-45, 1e-38, 1e38):
    w = np.float32(scale) * jnp.sign(weights())
    q = formats.quantize_weight(w, format=format)
    formats.validate_qtensor(q)
    error = np.abs(np.asarray(formats.dequantize(q)) - np.asarray(w))
    assert (error <= max(scale * 0.1, 1e-30)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_zero_tensor(format):
  q = formats.quantize_weight(jnp.zeros((16, 96)), format=format)
  formats.validate_qtensor(q)
  assert q.tensor_scale == 1
  assert (np.float32(q.group_scale) == 1).all()
  for level in q.levels:
    values = np.asarray(formats.dequantize(q, level))
    assert values.shape == (16, 96)
    assert not values.any()


def test_zero_and_small_groups():
  w = np.asarray(weights()).copy()
  w[1, 16:32] = 0
  w[2, 32:48] *= 1e-6
  q = formats.quantize_weight(jnp.asarray(w), format="autofp6")
  scale = np.float32(q.group_scale)
  assert scale[1, 1] == 1
  assert scale[2, 2] == 2.0**-4
  assert not np.asarray(formats.dequantize(q))[1, 16:32].any()
  # A quarter of any scale is a scale: refinement rides at s / 4.
  assert np.isin(scale / 4, reference.E4M3).all()


@pytest.mark.parametrize("format", FORMATS)
def test_negative_zero_is_stored_as_zero(format):
  w = jnp.array([[-0.0, -1e-4, 1.0, -0.0] * 24] * 16)
  codes = formats.quantize_weight(w, format=format).codes
  base = formats.decode_base(formats.quantize_weight(w, format=format))
  assert not np.signbit(np.asarray(base)).any()
  zero = formats.quantize_weight(jnp.abs(w), format=format).codes
  np.testing.assert_array_equal(codes, zero)


@pytest.mark.parametrize(
  ("format", "level"), [("nvfp4", 4), ("fp6g", 6), ("autofp6", 4)]
)
def test_quantizing_again_changes_nothing_where_the_scale_survives(
  format, level
):
  # A largest weight of 6 (or 7.5) * 448 makes the tensor scale exactly 1.
  w = np.asarray(weights(seed=3)).copy()
  w[5, 40] = 448 * largest(format)
  w *= 2.0**-7
  first = formats.quantize_weight(jnp.asarray(w), format=format)
  values = formats.dequantize(first, level)
  second = formats.quantize_weight(
    values, format=format, refinement_mask=np.zeros(24, bool)
  )
  assert second.tensor_scale == first.tensor_scale == 2.0**-7
  again, base, scale = (
    np.asarray(array).reshape(16, 6, -1)
    for array in (
      formats.decode_base(second),
      formats.decode_base(first),
      np.float32(first.group_scale),
    )
  )
  # A scale survives where an element still asks for it, or at its least.
  reached = np.abs(base).max(axis=2) == largest(format)
  kept = reached | (scale[..., 0] == 2.0**-4)
  assert kept.all() if format != "fp6g" else kept.mean() > 0.4
  np.testing.assert_array_equal(again[kept], base[kept])
  np.testing.assert_array_equal(
    np.float32(second.group_scale)[reached], scale[reached][:, 0]
  )


@pytest.mark.parametrize("format", FORMATS)
def test_rows_share_nothing_but_tensor_scale_and_mask(format):
  w = weights()
  order = np.random.default_rng(0).permutation(16)
  mask = np.arange(24) % 3 == 0
  q = formats.quantize_weight(w, format=format, refinement_mask=mask)
  moved = formats.quantize_weight(w[order], format=format, refinement_mask=mask)
  changed = w.at[3].multiply(0.5)
  other = formats.quantize_weight(
    changed.at[0, 0].set(jnp.max(jnp.abs(w))),
    format=format,
    refinement_mask=mask,
  )
  assert other.tensor_scale == q.tensor_scale
  keep = [row for row in range(16) if row not in (0, 3)]
  for name in ("codes", "group_scale", "offsets"):
    field = getattr(q, name)
    if field is None:
      continue
    np.testing.assert_array_equal(getattr(moved, name), field[order])
    np.testing.assert_array_equal(
      getattr(other, name)[np.array(keep)], field[np.array(keep)]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_number_never_replaces_what_is_not_finite(format, bad):
  w = weights().at[1, 5].set(bad)
  q = formats.quantize_weight(w, format=format)
  assert not np.isfinite(np.asarray(formats.dequantize(q))).any()
  with pytest.raises(QTensorError, match="scale has .* not finite"):
    formats.validate_qtensor(q)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_check_finite_names_the_tensor_and_counts(dtype):
  w = np.ones((4, 5), dtype)
  formats.check_finite("model.layers.3.mlp.up_proj.weight", w)
  w[0, 0] = w[2, 1] = np.nan
  w[1] = -np.inf
  with pytest.raises(
    NonFiniteError,
    match=r"model\.layers\.3\.mlp\.up_proj\.weight holds 2 NaN and 5 Inf"
    " out of 20 values",
  ) as error:
    formats.check_finite("model.layers.3.mlp.up_proj.weight", w)
  assert isinstance(error.value, AutoematicError)


def test_bfloat16_weights_quantize_as_their_float32_values():
  w = weights().astype(jnp.bfloat16)
  assert_same(
    formats.quantize_weight(w, format="autofp6"),
    formats.quantize_weight(w.astype(jnp.float32), format="autofp6"),
  )


@pytest.mark.parametrize(
  ("format", "bits"),
  [("nvfp4", 4.5), ("fp6g", 6.5), ("autofp6", 4.9), ("autofp8", 5.3)],
)
def test_stored_bits(format, bits):
  q = formats.quantize_weight(weights(256, 1280), format=format, rho=0.2)
  assert q.stored_bits == pytest.approx(bits, abs=0.005)
  total = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(q))
  assert q.stored_bits == 8 * total / (256 * 1280)


def test_errors_of_gaussian_weights():
  """Relative squared errors of each format, as published and measured."""
  w = jnp.asarray(np.random.default_rng(0).standard_normal((512, 1024)))

  def error(values):
    difference = np.float64(values) - np.float64(w)
    return (difference**2).sum() / (np.float64(w) ** 2).sum()

  full = np.ones(256, bool)
  nvfp4 = formats.quantize_weight(w, format="nvfp4")
  fixed, exponent = (
    formats.quantize_weight(
      w, format="autofp6", decoding=decoding, refinement_mask=full
    )
    for decoding in DECODINGS
  )
  fp6g = formats.quantize_weight(w, format="fp6g")
  assert error(formats.dequantize(nvfp4)) == pytest.approx(0.0090, abs=1e-4)
  assert error(formats.dequantize(fixed)) == pytest.approx(0.0034, abs=1e-4)
  assert error(formats.dequantize(exponent)) == pytest.approx(0.0012, abs=1e-4)
  assert error(formats.dequantize(fp6g)) == pytest.approx(0.0007, abs=1e-4)
  two_bits = np.float64(formats.dequantize(nvfp4, 2))
  for c, expected in ((1, 0.364), (2, 0.092), (3, 0.185)):
    assert error(two_bits * c / 2) == pytest.approx(expected, abs=1e-3)


def test_what_cannot_be_quantized_is_refused():
  w = weights(4, 60)
  for call, message in [
    (
      lambda: formats.quantize_weight(w[:0], format="nvfp4"),
      r"\[0, 60\]; need \[N, K\]",
    ),
    (
      lambda: formats.quantize_weight(
        w, format="autofp6", refinement_mask=np.ones(15, bool)
      ),
      r"\(15,\).*60 columns.*\[16\]",
    ),
    (lambda: formats.quantize_weight(w, format="autofp6", rho=0.6), "rho=0.6"),
    (lambda: formats.quantize_weight(w, format="autofp6", rho=-0.1), "0.1"),
    (
      lambda: formats.refinement_gain(w, format="fp6g", decoding="fixed"),
      "fp6g has no refinement.*autofp6",
    ),
  ]:
    with pytest.raises(QTensorError, match=message):
      call()
