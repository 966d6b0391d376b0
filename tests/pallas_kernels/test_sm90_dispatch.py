"""Which Hopper kernel a shape gets, and what does not run there says so."""

import jax.numpy as jnp
import numpy as np
import pytest
from packed_weights import random_weight
from unpacked_weights import unpack_layer

from autoematic_jax import formats
from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import extended_gemm
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90
from autoematic_jax.pallas_kernels.extended_gemm import prepack
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import unpack
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Plan
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import StreamTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import WgmmaTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import (
  choose_packing,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import choose_tile

GATE, UP, DOWN = (28672, 8192), (12288, 4096), (4096, 12288)


def shape_only(shape, max_rows):
  """A weight of which the dispatcher reads nothing but numbers."""
  packing = choose_packing(*shape, max_rows)
  nothing = jnp.zeros((1, 1, 1, 1, 1), jnp.uint32)
  return FragmentWeight(
    units=nothing,
    offsets=None,
    sources=jnp.zeros((1, 1), jnp.int32),
    tensor_scale=jnp.zeros((1, 1)),
    mask=jnp.zeros((1, 1), bool),
    format="nvfp4",
    decoding="exponent",
    inputs=shape[1],
    rows=shape[0],
    max_rows=packing.max_rows,
    tiles=packing.tiles,
    slices=packing.slices,
    doubles=0,
    singles=0,
  )


def stream(tiles, rows, columns, splits, depth):
  return StreamTile(
    tiles=tiles,
    row_warps=rows,
    column_warps=columns,
    splits=splits,
    depth=depth,
    cluster=splits,
  )


@pytest.mark.parametrize(
  ("shape", "m", "mode", "tile"),
  [
    (GATE, 16, "4", stream(7, 2, 8, 1, 2)),
    (GATE, 16, "6", stream(7, 2, 8, 1, 2)),
    (UP, 16, "4", stream(3, 2, 8, 1, 5)),
    (UP, 16, "6", stream(3, 2, 8, 1, 4)),
    (DOWN, 16, "4", stream(4, 1, 16, 2, 3)),
    (DOWN, 16, "mixed", stream(4, 1, 16, 2, 2)),
    (GATE, 64, "4", WgmmaTile(row_warps=16, splits=1, depth=3, group=4)),
    (GATE, 64, "6", WgmmaTile(row_warps=16, splits=1, depth=5, group=2)),
    (
      *(UP, 64, "4"),
      WgmmaTile(row_warps=12, splits=2, depth=3, group=4, cluster=2),
    ),
    (DOWN, 64, "4", WgmmaTile(row_warps=16, splits=8, depth=3, group=4)),
  ],
)
def test_measured_shapes_run_the_fastest_measured_variant(shape, m, mode, tile):
  assert choose_tile(shape_only(shape, m), m, mode) == tile


@pytest.mark.parametrize("mode", ["4", "6", "mixed"])
@pytest.mark.parametrize("m", [1, 8, 16, 17, 40, 64])
@pytest.mark.parametrize(
  "shape",
  [(1, 16), (1000, 1120), (1024, 4096), (6144, 4096), (57344, 8192), DOWN],
)
def test_every_shape_fits_and_is_covered(shape, m, mode):
  n, k = shape
  weight = shape_only(shape, m)
  tile = choose_tile(weight, m, mode)
  row_blocks = -(-n // (16 * weight.tiles))
  plan = Plan(
    m=m,
    n=n,
    k=k,
    row_blocks=row_blocks,
    steps=-(-k // (64 * tile.slices)),
    doubles=0,
    singles=0,
    exponent=True,
    mode=mode,
    tile=tile,
  )
  assert plan.shared_bytes <= 232448
  assert tile.depth >= 2
  assert (tile.tiles, tile.slices) == (weight.tiles, weight.slices)
  assert plan.blocks * tile.row_warps >= row_blocks


def test_more_rows_than_packed_for_are_refused():
  with pytest.raises(PrecisionError, match="17 rows.*packed for 16"):
    choose_tile(shape_only(UP, 16), 17, "4")
  with pytest.raises(PrecisionError, match="max_rows=65"):
    choose_packing(*UP, 65)


def test_another_device_is_named():
  weight = prepack([[random_weight(np.random.default_rng(0), 16, 64)]])
  x = jnp.zeros((2, 64))
  for implementation in (None, "mosaic_sm90"):
    with pytest.raises(PrecisionError, match="Hopper.*cpu.*'xla'"):
      extended_gemm(x, weight, 4, implementation=implementation)
  with pytest.raises(PrecisionError, match="prepack"):
    extended_gemm(x, weight, 4, implementation="xla")


def test_activations_are_exact_in_float16():
  scale = np.arange(1, 127, dtype=np.uint8)
  scale = formats.decode_e4m3(jnp.asarray(scale).view(jnp.float8_e4m3fn))
  codes = jnp.repeat(jnp.arange(16, dtype=jnp.uint8), 4)
  base = formats.decode_e2m1(codes)
  offsets = jnp.tile(jnp.arange(-2, 2, dtype=jnp.int32), 16)
  for decoding in ("fixed", "exponent"):
    delta = formats.offset_delta(offsets, base, decoding)
    values = np.asarray((base + delta)[:, None] * scale, np.float64)
    np.testing.assert_array_equal(values.astype(np.float16), values)


def emulated_unpack(weight, layer, *, mode):
  """What the decoding kernel writes, from the order that its module states."""
  plan = unpack.plan_of(weight, mode)
  values = {
    level: np.asarray(unpack_layer(weight, layer[0], level), np.float64)
    for level in (4, 6)
  }
  values["delta"] = values[6] - values[4]

  def words(level, steps, count):
    """Some words of each group, of some steps of each slice."""
    shape = (weight.rows, plan.slices, plan.steps, 4, 4, 4)
    chosen = values[level].reshape(shape)[:, :, steps, :, count]
    return chosen.reshape(weight.rows, plan.slices, -1)

  base = values[4 if plan.mode == "mixed" else int(plan.mode)]
  base = base.reshape(weight.rows, -1, 4, 2, 8).swapaxes(2, 3)
  out = [base.reshape(weight.rows, -1)]
  if plan.mode == "mixed":
    ends = (plan.doubles, plan.doubles + plan.singles)
    refined = [
      words("delta", slice(0, ends[0]), slice(0, 2)),
      words("delta", slice(*ends), slice(0, 1)),
    ]
    refined = np.concatenate(refined, axis=2)
    out.append(refined.reshape(weight.rows, -1))
  out = np.concatenate(out, axis=1)
  assert out.shape == (weight.rows, plan.columns)
  return jnp.asarray(out / decode.EPILOGUE, jnp.float16)


@pytest.mark.parametrize("present", [(4,), (6,), (4, 6)])
def test_many_rows_meet_base_and_offsets(monkeypatch, present):
  monkeypatch.setattr(unpack, "unpack", emulated_unpack)
  rng = np.random.default_rng(0)
  layers = [[random_weight(rng, 24, 240, most=most)] for most in (2, 0, 1)]
  weight = prepack(layers)
  x = rng.standard_normal((8 * weight.max_rows + 5, 240))
  x = jnp.asarray(x, jnp.float32)
  x = x.at[3].set(jnp.nan)
  levels = np.resize(present, len(x)).astype(np.int32)
  for number, (layer,) in enumerate(layers):
    rows = quantize_rows(x, jnp.asarray(levels), present=present)
    out = mosaic_sm90.multiply(
      rows, weight, jnp.asarray(number), present=present
    )
    a = np.asarray(rows.scaled(rows.values + rows.delta) * rows.tensor_scale)
    expected = np.stack(
      [
        np.asarray(formats.dequantize(layer, int(level)), np.float64) @ row
        for level, row in zip(levels, a.astype(np.float64), strict=True)
      ]
    )
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()
    scale = np.nanmax(np.abs(expected))
    np.testing.assert_allclose(
      np.asarray(out) / scale, expected / scale, atol=3e-6
    )
