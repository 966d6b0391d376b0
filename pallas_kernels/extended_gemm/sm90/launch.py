"""Launches a kernel on one layer of a stacked weight."""

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import unpack
from autoematic_jax.pallas_kernels.extended_gemm.sm90.decode import EPILOGUE
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Mode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Plan
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Tile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import WgmmaTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import permute_rows
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import stage_rows
from autoematic_jax.pallas_kernels.extended_gemm.sm90.stream import StreamBody
from autoematic_jax.pallas_kernels.extended_gemm.sm90.wgmma import WgmmaBody


def decode_gemm(
  x: Float[Array, "M K"],
  weight: FragmentWeight,
  row_scale: Float[Array, "M"],
  levels: Int[Array, "M"],
  layer: Int[Array, "1"],
  *,
  tile: Tile,
  mode: Mode,
) -> Float[Array, "M N"]:
  """Rows of x, each at its level, against one layer of a stacked weight.

  Args:
    x: float16 rows, quantized and multiplied by their group scales.
    weight: Stacked weights in fragment order, packed for `tile.slices`.
    row_scale: What row m of the result is multiplied by.
    levels: 4 or 6 for each row.
    layer: Which layer.
    tile: How to cut the work.
    mode: Which levels occur; a weight without offsets runs at `4`.

  Returns:
    `[M, N]` float32.

  Raises:
    PrecisionError: The weight is packed for another tile, or the tile needs
      more shared memory than there is.
  """
  if (weight.slices, weight.tiles) != (tile.slices, tile.tiles):
    raise PrecisionError(
      f"packed for {weight.slices} slices and {weight.tiles} tiles, not"
      f" {tile.slices} and {tile.tiles}"
    )
  rows = x.shape[0]
  refined = weight.offsets is not None
  if refined:
    x = permute_rows(x, weight.sources[layer[0]])
  plan = Plan(
    m=rows,
    n=weight.rows,
    k=x.shape[1],
    row_blocks=weight.units.shape[1],
    steps=weight.units.shape[2] // tile.slices,
    doubles=weight.doubles,
    singles=weight.singles,
    exponent=weight.decoding == "exponent",
    mode=mode if refined else "4",
    tile=tile,
  )
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
  shape = (rows, weight.rows)
  if tile.parts > 1:
    shape = (tile.parts, *shape)
  out = _launch(plan, operands, jax.ShapeDtypeStruct(shape, jnp.float32))
  if tile.parts > 1:
    total = out[0]
    for part in out[1:]:
      total = total + part
    out = total * (row_scale[:, None] * EPILOGUE)
    out = out * weight.tensor_scale[layer[0]]
  return out


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


def _launch(plan, operands, out_type):
  tile = plan.tile
  cluster = {}
  if tile.cluster > 1:
    cluster = {"cluster": (tile.cluster,), "cluster_names": ("k",)}
  return plgpu.kernel(
    partial(_kernel, plan, (*operands, "out")),
    out_type=out_type,
    scratch_types=(plgpu.SMEM((plan.shared_bytes // 4,), jnp.uint32),),
    grid=(plan.blocks * tile.splits // tile.cluster,),
    grid_names=("n",),
    num_threads=tile.warpgroups,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
    **cluster,
  )(*operands.values())


def _kernel(plan, names, *refs):
  body = WgmmaBody if isinstance(plan.tile, WgmmaTile) else StreamBody
  emit = plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
  emit(lambda _, *inner: body(plan, names, *inner).emit())(*refs)
