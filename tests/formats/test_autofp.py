import jax.numpy as jnp
import numpy as np
import pytest
from formats import numpy_reference as reference

from autoematic_jax import formats

SIGNED_E2M1 = np.unique(np.concatenate([reference.E2M1, -reference.E2M1]))
DECODINGS = ("fixed", "exponent")
OFFSETS = {
  6: (formats.offset, formats.offset_delta, range(-2, 2)),
  8: (formats.offset8, formats.offset8_delta, range(-8, 8)),
}


def f32(values):
  return jnp.asarray(values, jnp.float32)


def every_base_and_offset(bits):
  d, q = np.meshgrid(OFFSETS[bits][2], SIGNED_E2M1)
  return d.ravel(), q.ravel()


def test_golden_digits(golden, run):
  q, digit = np.array(golden["autofp2_digit"], np.float32).T
  np.testing.assert_array_equal(run(formats.autofp2_digit, f32(q)), digit)
  np.testing.assert_array_equal(run(formats.autofp2_digit, f32(-q)), -digit)


def test_two_bits_less_four_bits_is_an_e2m1_value(golden):
  q, expected = np.array(golden["autofp2_minus_nvfp4"], np.float32).T
  difference = 2 * np.asarray(formats.autofp2_digit(f32(q))) - q
  np.testing.assert_array_equal(difference, expected)
  assert set(np.abs(difference)) <= set(reference.E2M1)


def test_digits_scaled_by_two_are_the_levels(run):
  digits = run(formats.autofp2_digit, f32(SIGNED_E2M1))
  values = set(np.asarray(formats.AUTOFP2_SCALE * digits).tolist())
  assert values == {-4, -2, 0, 2, 4}


@pytest.mark.parametrize(
  ("decoding", "offsets", "refined"),
  [("fixed", "d", "refined"), ("exponent", "d_exponent", "refined_exponent")],
)
def test_golden_table7(golden, run, decoding, offsets, refined):
  table = golden["table7"]
  x = f32(table["x_over_s"])
  q = run(formats.round_e2m1, x)
  np.testing.assert_array_equal(q, table["q"])
  d = run(lambda x, q: formats.offset(x, q, decoding), x, q)
  mask = np.repeat(np.array(table["mask_subgroups_0_to_3"], bool), 4)
  expected = np.array(table[offsets], object)[mask].astype(int)
  np.testing.assert_array_equal(np.asarray(d)[mask], expected)
  delta = run(lambda d, q: formats.offset_delta(d, q, decoding), d, q)
  np.testing.assert_array_equal(
    np.where(mask, q + delta, q), np.float32(table[refined])
  )
  if decoding == "fixed":
    packed = formats.pack_pairs(jnp.asarray(np.asarray(d)[mask] & 3, "uint8"))
    assert packed.tolist() == table["offset_bytes_sg1_sg2"]


def test_golden_autofp8(golden, run):
  rows = golden["autofp8"]
  x, q, d, limb1, limb2, d6 = (
    np.array([row[name] for row in rows], np.float32)
    for name in ("x", "q", "d", "limb1", "limb2", "d6")
  )
  np.testing.assert_array_equal(run(formats.round_e2m1, f32(x)), q)
  actual = run(lambda x, q: formats.offset8(x, q, "fixed"), f32(x), f32(q))
  np.testing.assert_array_equal(actual, d)
  d1, d0 = run(formats.split_offset8, actual)
  np.testing.assert_array_equal(d1 / 2, limb1)
  np.testing.assert_array_equal(d0 / 2, limb2)
  np.testing.assert_array_equal(run(formats.offset8_to_offset6, actual), d6)


def test_golden_extended_k(golden):
  """Quarter-scale E2M1 operands carry the refinement exactly."""
  case = {k: np.array(v, np.float32) for k, v in golden["extended_k"].items()}
  delta_w, delta_a = (
    np.asarray(formats.offset_delta(jnp.asarray(d, jnp.int8), f32(q), "fixed"))
    for d, q in ((case["d_w"], case["wq"]), (case["d_a"], case["aq"]))
  )
  weight, activation = case["m_w"] > 0, case["m_a"] > 0
  wqr = np.where(weight, 4 * delta_w, np.where(activation, case["wq"], 0))
  aqr = np.where(weight, case["aq"], np.where(activation, 4 * delta_a, 0))
  np.testing.assert_array_equal(wqr, case["wqr"])
  np.testing.assert_array_equal(aqr, case["aqr"])
  base = case["wq"] @ case["aq"]
  assert base == case["base"]
  assert base + wqr @ aqr / 4 == case["result"]


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("bits", OFFSETS)
def test_offset_is_the_best_there_is(run, decoding, bits):
  # Multiples of 1/128 meet every tie of every step.
  x = np.arange(-7 * 128, 7 * 128 + 1) / 128
  q = reference.nearest(x, reference.E2M1)
  function = OFFSETS[bits][0]
  d = run(lambda x, q: function(x, q, decoding), f32(x), f32(q))
  assert d.dtype == jnp.int8
  expected = reference.best_offset(x, q, decoding, bits)
  np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("bits", OFFSETS)
def test_a_tie_goes_to_the_smaller_offset(decoding, bits):
  function, _, allowed = OFFSETS[bits]
  for q in SIGNED_E2M1:
    step = reference.step(q, decoding, bits)
    for d in list(allowed)[:-1]:
      tie = q + (d + 0.5) * step
      actual = int(function(f32(tie), f32(q), decoding))
      assert actual == min(d, d + 1, key=abs), (q, d)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_refinement_fits_the_hardware_of_the_base(decoding):
  d, q = every_base_and_offset(6)
  delta = formats.offset_delta(jnp.asarray(d), f32(q), decoding)
  np.testing.assert_array_equal(delta, d * reference.step(q, decoding, 6))
  assert set(np.abs(4 * np.asarray(delta))) <= set(reference.E2M1)
  d, q = every_base_and_offset(8)
  delta = formats.offset8_delta(jnp.asarray(d), f32(q), decoding)
  np.testing.assert_array_equal(delta, d * reference.step(q, decoding, 8))
  d1, d0 = (np.asarray(limb) for limb in formats.split_offset8(jnp.asarray(d)))
  high, low = (16 * limb * reference.step(q, decoding, 8) for limb in (d1, d0))
  assert set(np.abs(high)) | set(np.abs(low)) <= set(reference.E2M1)
  np.testing.assert_array_equal(high / 4 + low / 16, delta)


def test_limbs_and_six_bit_offset_of_every_eight_bit_offset():
  d = np.arange(-8, 8)
  d1, d0 = formats.split_offset8(jnp.asarray(d, jnp.int8))
  np.testing.assert_array_equal(4 * d1 + d0, d)
  assert (int(d1.min()), int(d1.max())) == (-2, 1)
  assert (int(d0.min()), int(d0.max())) == (0, 3)
  six = formats.offset8_to_offset6(jnp.asarray(d, jnp.int8))
  expected = [-2, -2, -1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
  assert six.tolist() == expected


def test_exponent_steps_reach_e2m3_values():
  d, q = every_base_and_offset(6)
  delta = formats.offset_delta(jnp.asarray(d), f32(q), "exponent")
  assert set(np.abs(q + np.asarray(delta))) <= set(reference.E2M3)


def test_scaled_values_are_exact_in_bf16_and_refined_ones_in_f16():
  scale = reference.E4M3[1:, None]
  base = scale * reference.E2M1
  np.testing.assert_array_equal(base, np.float64(jnp.bfloat16(base)))
  for decoding in DECODINGS:
    d, q = every_base_and_offset(6)
    delta = formats.offset_delta(jnp.asarray(d), f32(q), decoding)
    refined = scale * (q + np.asarray(delta, np.float64))
    np.testing.assert_array_equal(refined, np.float64(np.float16(refined)))


@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_nearest_pair_is_the_best_of_all(decoding, run):
  x = np.concatenate([np.linspace(-8, 8, 4097), [0.0, -0.0, np.inf, -np.inf]])
  x = x.astype(np.float32)
  q, d = run(
    lambda x: formats.nearest_pair(x, formats.round_e2m1(x), decoding), f32(x)
  )
  found = np.asarray(q + formats.offset_delta(d, q, decoding))
  offsets, bases = every_base_and_offset(6)
  reached = bases + np.asarray(
    formats.offset_delta(jnp.asarray(offsets), f32(bases), decoding)
  )
  inside = np.abs(x) <= 6
  best = np.abs(x[inside, None] - reached).min(axis=1)
  np.testing.assert_array_equal(np.abs(x - found)[inside], best)
  nearest = np.asarray(formats.round_e2m1(f32(x)))
  other = np.asarray(q) != nearest
  own = nearest + np.asarray(
    formats.offset_delta(
      formats.offset(f32(x), f32(nearest), decoding), f32(nearest), decoding
    )
  )
  assert np.all(np.abs(x - found)[other] < np.abs(x - own)[other])
  assert other.any()
  outside = np.isinf(x)
  np.testing.assert_array_equal(np.abs(np.asarray(q)[outside]), 6)


def test_a_nan_has_no_nearest_pair(run):
  x = f32([np.nan])
  near = formats.round_e2m1(x)
  q, _ = run(lambda x: formats.nearest_pair(x, near, "exponent"), x)
  assert np.isnan(q).all()
