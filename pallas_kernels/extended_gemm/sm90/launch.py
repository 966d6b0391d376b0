"""Launches a kernel on one layer of a stacked weight."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import unpack
from autoematic_jax.pallas_kernels.extended_gemm.sm90.decode import EPILOGUE
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Mode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Plan
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import StreamTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Tile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import WgmmaTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import permute_rows
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import stage_rows
from autoematic_jax.pallas_kernels.extended_gemm.sm90.stream import StreamBody
from autoematic_jax.pallas_kernels.extended_gemm.sm90.wgmma import WgmmaBody
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.launch import launch


def decode_gemm(
  x: Float[Array, "M K"],
  weight: FragmentWeight,
  row_scale: Float[Array, "M"],
  levels: Int[Array, "M"],
  layer: Int[Array, "1"],
  *,
  tiles: Mapping[Mode, Tile],
) -> Float[Array, "M N"]:
  """Rows of x, each at its level, against one layer of a stacked weight.

  One kernel holds a variant for each mode that may occur, and picks one when
  it runs: the host need not know the levels.

  Args:
    x: float16 rows, quantized and multiplied by their group scales, in the
      order of the layer's columns; what is missing at the end is zero.
    weight: Stacked weights in fragment order, packed for the tiles.
    row_scale: What row m of the result is multiplied by.
    levels: 4 or 6 for each row.
    layer: Which layer.
    tiles: How to cut the work in each mode that the rows may be in; a weight
      without offsets runs at `4` in all of them. Several tiles differ in
      nothing but the depth of their rings.

  Returns:
    `[M, N]` float32.

  Raises:
    PrecisionError: The weight is packed for another tile, a tile needs more
      shared memory than there is, or one kernel cannot hold all tiles.
  """
  plans = [_plan(x, weight, mode, tile) for mode, tile in tiles.items()]
  if weight.offsets is None:
    plans = plans[:1]
  tile = _common_tile(plans)
  if isinstance(tile, WgmmaTile):
    x = stage_rows(x, weight.units.shape[2])
  operands = {
    "units": weight.units,
    "x": x,
    "row_scale": row_scale,
    "levels": levels,
    "layer": layer,
    "weight_scale": weight.tensor_scale,
  }
  if weight.offsets is not None:
    operands["offsets"] = weight.offsets
  shape = (plans[0].m, weight.rows)
  if tile.parts > 1:
    shape = (tile.parts, *shape)
  out = launch(
    partial(_emit, plans),
    operands,
    {"out": jax.ShapeDtypeStruct(shape, jnp.float32)},
    name="decode_gemm",
    blocks=plans[0].blocks * tile.splits,
    threads=128 * tile.warpgroups,
    shared_words=max(plan.shared_bytes for plan in plans) // 4,
    cluster=tile.cluster,
  )
  if tile.parts > 1:
    total = out[0]
    for part in out[1:]:
      total = total + part
    out = total * (row_scale[:, None] * EPILOGUE)
    out = out * weight.tensor_scale[layer[0]]
  return out


def _plan(x, weight, mode, tile):
  if (weight.slices, weight.tiles) != (tile.slices, tile.tiles):
    raise PrecisionError(
      f"packed for {weight.slices} slices and {weight.tiles} tiles, not"
      f" {tile.slices} and {tile.tiles}"
    )
  return Plan(
    m=x.shape[0],
    n=weight.rows,
    k=x.shape[1],
    row_blocks=weight.units.shape[1],
    steps=weight.units.shape[2] // tile.slices,
    doubles=weight.doubles,
    singles=weight.singles,
    exponent=weight.decoding == "exponent",
    mode=mode if weight.offsets is not None else "4",
    tile=tile,
  )


def _common_tile(plans):
  """The first tile, once it is known that the others start alike."""
  first = plans[0].tile
  for plan in plans[1:]:
    kinds = {type(plan.tile), type(first)}
    alike = dataclasses.replace(plan.tile, depth=first.depth) == first
    if kinds != {StreamTile} or not alike:
      raise PrecisionError(f"one kernel cannot hold {first} and {plan.tile}")
  return first


def many_rows_gemm(
  x: Float[Array, "M K"],
  weight: FragmentWeight,
  row_scale: Float[Array, "M 1"],
  levels: Int[Array, "M"],
  layer: Int[Array, ""],
  *,
  mode: Mode,
) -> Float[Array, "M N"]:
  """The same for any number of rows, over the layer decoded to float16.

  Rows at two levels meet the base and, behind it, the offsets: of x, rows at 4
  bits have zeros there.

  Args:
    x: float16 rows, quantized and multiplied by their group scales.
    weight: Stacked weights in fragment order, however they are cut.
    row_scale: What each row of the result is multiplied by.
    levels: 4 or 6 for each row.
    layer: Which layer.
    mode: Which levels occur.

  Returns:
    `[M, N]` float32.
  """
  plan = unpack.plan_of(weight, mode)
  w = unpack.unpack(weight, layer.reshape(1), mode=mode)
  x = permute_rows(x, unpack.column_sources(plan, weight.sources[layer]))
  if plan.mode == "mixed":
    base = jnp.arange(plan.columns) < plan.base_columns
    x = jnp.where(base | (levels[:, None] >= 6), x, jnp.float16(0))
  # By default, float16 is multiplied exactly and added in float32.
  out = jnp.dot(x, w.T, preferred_element_type=jnp.float32)
  return out * (row_scale * EPILOGUE) * weight.tensor_scale[layer]


def _emit(plans, names, *refs):
  def variant(plan):
    body = WgmmaBody if isinstance(plan.tile, WgmmaTile) else StreamBody
    body(plan, names, *refs).emit()

  if len(plans) == 1:
    variant(plans[0])
    return
  wanted = _wanted_mode(refs[names.index("levels")], plans[0].m)
  for plan in plans:
    here = mlir.equal(wanted, _MODES.index(plan.mode))
    mlir.when(here, partial(variant, plan))


_MODES = ("4", "6", "mixed")


def _wanted_mode(levels, rows):
  """Index of the mode that up to 32 rows are in, found by each warp."""
  lane = mlir.and_(ptx.special("tid.x"), 31)
  row = mlir.minimum(lane, rows - 1)
  level = ptx.load_global(mlir.offset(mlir.global_address(levels), row, 4))
  six = ptx.ballot(mlir.less(mlir.const(5), level))
  mode = mlir.select(mlir.equal(six, 0), mlir.const(0), mlir.const(2))
  all_six = mlir.equal(six, mlir.const(0xFFFFFFFF))
  return mlir.select(all_six, mlir.const(1), mode)
