import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats import numpy_reference as reference

from autoematic_jax import formats
from autoematic_jax.errors import QTensorError

FORMATS = ("nvfp4", "fp6g", "autofp6", "autofp8")


def make(format="autofp6", rows=6, columns=60, seed=0, **options):
  w = np.random.default_rng(seed).standard_normal((rows, columns))
  return formats.quantize_weight(
    jnp.asarray(w, jnp.float32), format=format, **options
  )


def stacked(format="autofp6"):
  """Layers whose masks differ, as a model stacks them."""
  layers = [make(format, seed=seed) for seed in range(3)]
  return layers, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def bits_of(packed, width):
  """Codes of a little-endian bit stream, by integers of any size."""
  word = int.from_bytes(np.asarray(packed, np.uint8).tobytes(), "little")
  count = len(packed) * 8 // width
  return np.array([(word >> (width * i)) % 2**width for i in range(count)])


def signed(codes, width):
  return np.where(codes >= 2 ** (width - 1), codes - 2**width, codes)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("decoding", ["fixed", "exponent"])
def test_levels_mean_what_the_definition_says(format, decoding):
  """Decodes the bytes by hand and compares every level."""
  q = make(format, decoding=decoding, rho=0.4)
  width = 6 if format == "fp6g" else 4
  codes = np.stack([bits_of(row, width) for row in q.codes])
  table = reference.E2M3 if format == "fp6g" else reference.E2M1
  half = len(table)
  base = table[codes % half] * np.where(codes >= half, -1, 1)
  np.testing.assert_array_equal(formats.decode_base(q), base)
  scale = np.repeat(np.float64(np.float32(q.group_scale)), 16, axis=1)
  scale *= np.float64(q.tensor_scale)
  expected = {4: base, 6: base}
  magnitude = np.abs(base)
  digit = np.select([magnitude >= 4, magnitude >= 1], [2, 1], 0)
  expected[2] = 2 * digit * np.sign(base)
  if q.offsets is not None:
    mask = bits_of(q.refinement_mask, 1)[:16].astype(bool)
    columns = np.flatnonzero(np.repeat(mask, 4))
    width = q.levels[-1] // 4 * 2
    d = np.stack([bits_of(row, width) for row in q.offsets])
    d = signed(d, width)
    for level in q.levels[2:]:
      used = d
      if format == "autofp8" and level == 6:
        used = np.clip((d + 2) // 4, -2, 1)
      delta = used * reference.step(base[:, columns], decoding, level)
      np.testing.assert_array_equal(formats.decode_offsets(q, level), delta)
      refined = base.copy()
      refined[:, columns] += delta
      expected[level] = refined
    np.testing.assert_array_equal(formats.mask_bits(q), mask)
    np.testing.assert_array_equal(formats.refined_columns(q), columns)
  for level in q.levels:
    actual = formats.dequantize(q, level)
    assert actual.shape == (6, 60)
    np.testing.assert_allclose(
      actual, (expected[level] * scale)[:, :60], rtol=2e-7
    )


@pytest.mark.parametrize(
  ("format", "levels"),
  [
    ("nvfp4", (2, 4)),
    ("fp6g", (6,)),
    ("autofp6", (2, 4, 6)),
    ("autofp8", (2, 4, 6, 8)),
  ],
)
def test_levels_held_and_refused(format, levels):
  q = make(format)
  assert q.levels == levels
  np.testing.assert_array_equal(
    formats.dequantize(q), formats.dequantize(q, levels[-1])
  )
  for level in {2, 3, 4, 6, 8} - set(levels):
    with pytest.raises(QTensorError, match=f"{format}.*{level} is not one"):
      formats.dequantize(q, level)
  for level in {4, 6, 8} - ({6, 8} & set(levels)):
    with pytest.raises(QTensorError, match=f"{format}.*no offsets.*{level}"):
      formats.decode_offsets(q, level)


def test_fp6g_holds_no_offsets_of_its_own_level():
  with pytest.raises(QTensorError, match="fp6g tensor holds no offsets"):
    formats.decode_offsets(make("fp6g"), 6)


@pytest.mark.parametrize("format", FORMATS)
def test_stacked_layers_decode_as_each_alone(format):
  layers, stack = stacked(format)
  formats.validate_qtensor(stack)
  assert stack.rows == 6
  assert stack.refined == layers[0].refined
  assert stack.stored_bits == pytest.approx(layers[0].stored_bits)
  functions = [formats.decode_base, formats.mask_bits, formats.refined_columns]
  for level in stack.levels:
    functions.append(lambda q, level=level: formats.dequantize(q, level))
    if level >= 6 and stack.offsets is not None:
      functions.append(lambda q, level=level: formats.decode_offsets(q, level))
  for function in functions:
    together = np.asarray(function(stack))
    for index, layer in enumerate(layers):
      np.testing.assert_array_equal(together[index], function(layer))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rho", [0.0, 0.2, 0.5])
def test_room_for_more_offsets_changes_no_value(format, rho):
  q = make(format, rho=rho)
  roomy = formats.with_room(q)
  if q.offsets is not None:
    assert roomy.refined == 64 // 8
  for level in q.levels:
    # Traced, a tensor has the room that it came with.
    decode = jax.jit(lambda q, level=level: formats.dequantize(q, level))
    np.testing.assert_array_equal(decode(roomy), decode(q))
    np.testing.assert_array_equal(formats.dequantize(q, level), decode(q))


def assembled(rho, columns=96):
  rng = np.random.default_rng(int(100 * rho))
  mask = np.zeros(columns // 4, bool)
  mask[: formats.refinement_budget(columns, rho)] = True
  return formats.assemble_qtensor(
    jax.device_put(rng.choice([-1.5, 0, 0.5, 4], (8, columns))),
    jnp.ones((8, columns // 16)),
    jnp.ones(()),
    format="autofp6",
    columns=columns,
    refinement_mask=mask,
    offsets=jax.device_put(rng.integers(-2, 2, (8, columns), np.int8)),
  )


def test_tensors_that_refine_more_and_less_share_their_programs(compiled):
  def run(rho):
    return formats.dequantize(assembled(rho))

  assert compiled(lambda: run(0.2))
  assert not compiled(lambda: run(0.3))


def test_masks_of_the_stacked_layers_differ():
  _, stack = stacked()
  assert len(np.unique(np.asarray(stack.refinement_mask), axis=0)) > 1


def test_layers_pass_through_scan():
  layers, stack = stacked()

  def layer(total, q):
    return total + formats.dequantize(q), formats.refined_columns(q)

  total, columns = jax.lax.scan(layer, jnp.zeros((6, 60)), stack)
  expected = sum(np.float64(formats.dequantize(q)) for q in layers)
  np.testing.assert_allclose(total, expected, atol=1e-5)
  for index, q in enumerate(layers):
    np.testing.assert_array_equal(columns[index], formats.refined_columns(q))


@pytest.mark.parametrize("format", FORMATS)
def test_tensor_is_a_pytree_with_static_options(format):
  q = make(format)
  leaves, structure = jax.tree.flatten(q)
  again = jax.tree.unflatten(structure, leaves)
  assert (again.format, again.columns) == (format, 60)
  through = jax.jit(lambda q: q)(q)
  formats.validate_qtensor(through)
  np.testing.assert_array_equal(through.codes, q.codes)
  with pytest.raises(dataclasses.FrozenInstanceError):
    q.columns = 4


def test_negative_zero_of_an_imported_code_is_kept():
  q = make("nvfp4")
  codes = jnp.full_like(q.codes, 0x88)
  base = formats.decode_base(dataclasses.replace(q, codes=codes))
  assert np.signbit(np.asarray(base)).all()
  back = formats.pack_nibbles(formats.encode_e2m1(base))
  np.testing.assert_array_equal(back, codes)


DAMAGE = [
  (lambda q: {"format": "int4"}, "int4"),
  (lambda q: {"decoding": "linear"}, "linear"),
  (lambda q: {"columns": 0}, "columns=0"),
  (lambda q: {"columns": 65}, r"codes is uint8\[6, 32\].*\[6, 40\]"),
  (lambda q: {"codes": q.codes[:, :-1]}, r"codes is uint8\[6, 31\]"),
  (lambda q: {"codes": q.codes.astype("int32")}, "codes is int32"),
  (lambda q: {"codes": q.codes | 1}, "codes has 12 values.*padding.*60 to 63"),
  (lambda q: {"group_scale": q.group_scale[:4]}, r"group_scale.*\[4, 4\]"),
  (
    lambda q: {"group_scale": q.group_scale.astype("float32")},
    "group_scale is float32",
  ),
  (
    lambda q: {"group_scale": (0 * q.group_scale).astype("float8_e4m3fn")},
    "group_scale has 24 values that are not finite and > 0",
  ),
  (lambda q: {"tensor_scale": -q.tensor_scale}, "tensor_scale has 1 values"),
  (
    lambda q: {"tensor_scale": q.tensor_scale[None]},
    r"tensor_scale is float32\[1\]",
  ),
  (lambda q: {"tensor_scale": jnp.float32(np.nan)}, "tensor_scale has 1"),
  (lambda q: {"offsets": None}, "autofp6 needs refinement_mask and offsets"),
  (lambda q: {"offsets": q.offsets[:2]}, r"offsets is uint8\[2, 3\]"),
  (lambda q: {"offsets": q.offsets[:, :2]}, r"marks \[3\].*hold 2"),
  (
    lambda q: {"refinement_mask": q.refinement_mask[:1]},
    r"refinement_mask is uint8\[1\]",
  ),
  (
    lambda q: {"refinement_mask": q.refinement_mask * 0},
    r"marks \[0\] subgroups.*hold 3",
  ),
  (lambda q: {"format": "nvfp4"}, "nvfp4 holds no refinement_mask"),
  (lambda q: {"format": "autofp8"}, r"offsets is uint8\[6, 3\].*\[6, 2\]"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_named(damage, message):
  q = make()
  with pytest.raises(QTensorError, match=message):
    formats.validate_qtensor(dataclasses.replace(q, **damage(q)))


def test_flags_beyond_the_last_group_are_refused():
  q = make(columns=16)
  mask = q.refinement_mask | 0x10
  with pytest.raises(QTensorError, match="beyond its 1 groups"):
    formats.validate_qtensor(dataclasses.replace(q, refinement_mask=mask))
