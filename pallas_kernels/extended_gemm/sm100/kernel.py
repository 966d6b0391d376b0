"""The product itself: `tcgen05.mma` over NVFP4 operands with block scales.

A block computes 128 outputs of a tile of rows. The weights are the left operand
whatever the number of rows, because that side of the instruction is always 128
long, while the other may be as short as a decode batch.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from autoematic_jax.pallas_kernels.extended_gemm.sm100.operands import (
  Operands,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm100.operands import Plan
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOM_LANES
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import (
  ATOM_SCALES,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOMS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import OUTPUTS

_CODE_TILE = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))
"""256 codes of 4 bits are the 128 bytes of a swizzled row."""


def product(operands: Operands, plan: Plan) -> Float[Array, "Mp Np"]:
  """Sums over all steps of each tile of rows, times both tensor scales.

  Args:
    operands: In the layout that the tensor cores read.
    plan: How the work is cut.

  Returns:
    `[Mp, Np]` float32, M and N rounded up to whole tiles.
  """
  f4, e4m3 = jnp.float4_e2m1fn, jnp.float8_e4m3fn
  scales = (1, ATOMS, ATOM_LANES, ATOM_SCALES)
  slots, rows = plan.depth, plan.rows
  kernel = plgpu.kernel(
    partial(body, plan),
    out_type=jax.ShapeDtypeStruct(
      (plan.row_tiles * rows, plan.output_tiles * OUTPUTS), jnp.float32
    ),
    grid=(plan.row_tiles, plan.output_tiles),
    grid_names=("rows", "outputs"),
    scratch_types=[
      plgpu.SMEM((slots, OUTPUTS, COLUMNS), f4, transforms=_CODE_TILE),
      plgpu.SMEM((slots, *scales), e4m3),
      plgpu.SMEM((slots, rows, COLUMNS), f4, transforms=_CODE_TILE),
      plgpu.SMEM((slots, *scales), e4m3),
      plgpu.SMEM((OUTPUTS,), jnp.float32),
      plgpu.SMEM((rows,), jnp.float32),
      plgpu.SMEM((rows, OUTPUTS), jnp.float32),
      plgpu.TMEM((OUTPUTS, rows), jnp.float32),
      _scale_memory(),
      _scale_memory(),
      plgpu.Barrier(num_arrivals=2),
      plgpu.Barrier(num_arrivals=4, num_barriers=slots),
      plgpu.Barrier(
        num_arrivals=1, num_barriers=slots, orders_tensor_core=True
      ),
    ],
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
  )
  return kernel(
    _as_e2m1(operands.weight_codes),
    operands.weight_scales,
    _as_e2m1(operands.row_codes),
    operands.row_scales,
    operands.steps,
    operands.counts,
    operands.layer,
    operands.weight_tensor_scale,
    operands.row_tensor_scale,
  )


def _scale_memory():
  return plgpu.TMEM(
    (OUTPUTS, ATOMS * 4),
    jnp.float8_e4m3fn,
    layout=plgpu.TMEMLayout.SCALES_LAYOUT,
  )


def _as_e2m1(codes):
  """Bytes as two codes each, the low nibble first; XLA moves nothing."""
  values = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn)
  return values.reshape(*codes.shape[:-1], -1)


def body(
  plan,
  w,
  w_scales,
  x,
  x_scales,
  steps,
  counts,
  layer,
  w_tensor_scale,
  x_tensor_scale,
  out,
  w_slots,
  w_scale_slots,
  x_slots,
  x_scale_slots,
  w_tensor_scale_tile,
  x_tensor_scale_tile,
  out_tile,
  acc,
  w_scale_tmem,
  x_scale_tmem,
  scaled,
  loaded,
  consumed,
):
  """One block; the operands in device memory, then scratch."""
  row_tile, output_tile = lax.axis_index("rows"), lax.axis_index("outputs")
  here, count, depth = layer[0], counts[row_tile], plan.depth
  outputs = pl.ds(output_tile * OUTPUTS, OUTPUTS)
  rows = pl.ds(row_tile * plan.rows, plan.rows)

  def load(step):
    tile = steps[row_tile, step]
    slot = lax.rem(step, depth)
    w_tile, x_scale_tile = plan.weight_tile(tile), plan.row_scale_tile(tile)

    def copy(source, slots):
      plgpu.copy_gmem_to_smem(source, slots.at[slot], loaded.at[slot])

    copy(w.at[here, outputs, _columns(w_tile)], w_slots)
    copy(w_scales.at[here, pl.ds(output_tile, 1), _atoms(tile)], w_scale_slots)
    copy(x.at[rows, _columns(tile)], x_slots)
    copy(x_scales.at[pl.ds(row_tile, 1), _atoms(x_scale_tile)], x_scale_slots)

  def multiply(step, _):
    ahead = step + depth - 1

    @pl.when(ahead < count)
    def _():
      # The slot that is filled next is the one read by the step before.
      @pl.when(step > 0)
      def _():
        plgpu.barrier_wait(consumed.at[lax.rem(step - 1, depth)])

      load(ahead)

    slot = lax.rem(step, depth)
    plgpu.barrier_wait(loaded.at[slot])
    plgpu.async_copy_scales_to_tmem(w_scale_slots.at[slot], w_scale_tmem)
    plgpu.async_copy_scales_to_tmem(x_scale_slots.at[slot], x_scale_tmem)
    plgpu.tcgen05_mma(
      acc,
      w_slots.at[slot],
      plgpu.transpose_ref(x_slots.at[slot], (1, 0)),
      consumed.at[slot],
      a_scale=w_scale_tmem,
      b_scale=x_scale_tmem,
      accumulate=step > 0,
    )

  def fill(step, _):
    load(step)

  def drain(step, _):
    plgpu.barrier_wait(consumed.at[lax.rem(step, depth)])

  plgpu.copy_gmem_to_smem(
    w_tensor_scale.at[here, outputs], w_tensor_scale_tile, scaled
  )
  plgpu.copy_gmem_to_smem(x_tensor_scale.at[rows], x_tensor_scale_tile, scaled)
  lax.fori_loop(0, jnp.minimum(depth - 1, count), fill, None)
  lax.fori_loop(0, count, multiply, None)
  lax.fori_loop(jnp.maximum(count - depth, 0), count, drain, None)

  total = plgpu.async_load_tmem(acc)
  plgpu.barrier_wait(scaled)
  w_scale, x_scale = w_tensor_scale_tile[...], x_tensor_scale_tile[...]
  total *= lax.broadcast_in_dim(w_scale, total.shape, (0,))
  total *= lax.broadcast_in_dim(x_scale, total.shape, (1,))
  out_tile.T[...] = total
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(out_tile, out.at[rows, outputs])
  plgpu.wait_smem_to_gmem(0)


def _columns(tile):
  return pl.ds(tile * COLUMNS, COLUMNS)


def _atoms(tile):
  return pl.ds(tile * ATOMS, ATOMS)
