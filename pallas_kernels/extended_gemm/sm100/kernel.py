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
from jaxtyping import Array, Float, Int

from autoematic_jax.pallas_kernels.extended_gemm.block_scaled import (
  BlockScaledWeight,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm100.operands import (
  RowOperands,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm100.plan import Plan
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOM_GROUPS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOM_LANES
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOM_ROWS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOMS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import GROUPS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import OUTPUTS

_CODE_TILE = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))
"""256 codes of 4 bits are the 128 bytes of a swizzled row."""


def product(
  rows: RowOperands,
  weight: BlockScaledWeight,
  layer: Int[Array, "1"],
  plan: Plan,
) -> Float[Array, "Mp Np"]:
  """Sums over the steps of each tile of rows, times both tensor scales.

  Args:
    rows: Activations.
    weight: Stacked weights.
    layer: Which of them.
    plan: How the work is cut.

  Returns:
    `[Mp, Np]` float32, M and N rounded up to whole tiles.
  """
  shape = (plan.row_tiles * plan.rows, plan.output_tiles * OUTPUTS)
  kernel = plgpu.kernel(
    partial(_body, plan),
    out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
    # Blocks that share weights run at about the same time.
    grid=(plan.output_tiles, plan.row_tiles),
    grid_names=("outputs", "rows"),
    scratch_types=_scratch(plan),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
  )
  return kernel(
    _as_e2m1(weight.codes),
    weight.scales,
    _as_e2m1(rows.codes),
    rows.scales,
    rows.steps,
    rows.counts,
    layer,
    weight.tensor_scale,
    rows.tensor_scale,
  )


def _scratch(plan):
  f4, e4m3, f32 = jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.float32
  depth, rows = plan.depth, plan.rows
  atoms = (depth, 1, ATOMS, ATOM_LANES, ATOM_ROWS * ATOM_GROUPS // ATOM_LANES)
  scale_tmem = plgpu.TMEM(
    (ATOM_ROWS, GROUPS), e4m3, layout=plgpu.TMEMLayout.SCALES_LAYOUT
  )
  return [
    plgpu.SMEM((depth, OUTPUTS, COLUMNS), f4, transforms=_CODE_TILE),
    plgpu.SMEM(atoms, e4m3),
    plgpu.SMEM((depth, rows, COLUMNS), f4, transforms=_CODE_TILE),
    plgpu.SMEM(atoms, e4m3),
    plgpu.SMEM((OUTPUTS,), f32),
    plgpu.SMEM((rows,), f32),
    plgpu.SMEM((rows, OUTPUTS), f32),
    plgpu.TMEM((OUTPUTS, rows), f32),
    scale_tmem,
    scale_tmem,
    plgpu.Barrier(num_arrivals=2),
    plgpu.Barrier(num_arrivals=4, num_barriers=depth),
    plgpu.Barrier(num_arrivals=1, num_barriers=depth, orders_tensor_core=True),
  ]


def _as_e2m1(codes):
  """Bytes as two codes each, the low nibble first; XLA moves nothing."""
  values = lax.bitcast_convert_type(codes, jnp.float4_e2m1fn)
  return values.reshape(*codes.shape[:-1], -1)


def _body(
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
  """One block: operands and result in device memory, then scratch."""
  output_tile, row_tile = lax.axis_index("outputs"), lax.axis_index("rows")
  here, count, depth = layer[0], counts[row_tile], plan.depth
  outputs = pl.ds(output_tile * OUTPUTS, OUTPUTS)
  rows = pl.ds(row_tile * plan.rows, plan.rows)

  def load(step, _=None):
    """Starts to fill a slot with what a step needs."""
    slot = lax.rem(step, depth)
    number = steps[row_tile, step]
    column_tile = lax.rem(number, plan.column_tiles)
    stored = column_tile < plan.stored_tiles
    w_tile = jnp.where(stored, number, column_tile)

    def copy(source, slots):
      plgpu.copy_gmem_to_smem(source, slots.at[slot], loaded.at[slot])

    copy(w.at[here, outputs, _columns(w_tile)], w_slots)
    copy(
      w_scales.at[here, pl.ds(output_tile, 1), _atoms(number)], w_scale_slots
    )
    copy(x.at[rows, _columns(number)], x_slots)
    copy(x_scales.at[pl.ds(row_tile, 1), _atoms(column_tile)], x_scale_slots)

  def multiply(step, _):
    """Fills the slot that the step before has left; multiplies another."""
    ahead = step + depth - 1

    @pl.when(ahead < count)
    def _():
      @pl.when(step > 0)
      def _():
        wait_consumed(step - 1)

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

  def wait_consumed(step, _=None):
    plgpu.barrier_wait(consumed.at[lax.rem(step, depth)])

  plgpu.copy_gmem_to_smem(
    w_tensor_scale.at[here, outputs], w_tensor_scale_tile, scaled
  )
  plgpu.copy_gmem_to_smem(x_tensor_scale.at[rows], x_tensor_scale_tile, scaled)
  lax.fori_loop(0, jnp.minimum(depth - 1, count), load, None)
  lax.fori_loop(0, count, multiply, None)
  # A barrier counts: every arrival is waited for once.
  lax.fori_loop(jnp.maximum(count - depth, 0), count, wait_consumed, None)

  # Of the layouts that Mosaic could infer, for 128 rows it finds none.
  one_output_a_thread = plgpu.Layout.TCGEN05_TMEM_NATIVE(1)
  total = plgpu.async_load_tmem(acc, layout=one_output_a_thread)
  plgpu.barrier_wait(scaled)
  w_scale, x_scale = w_tensor_scale_tile[...], x_tensor_scale_tile[...]
  total *= lax.broadcast_in_dim(x_scale, total.shape, (1,))
  total *= lax.broadcast_in_dim(w_scale, total.shape, (0,))
  out_tile.T[...] = total
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(out_tile, out.at[rows, outputs])
  plgpu.wait_smem_to_gmem(0)


def _columns(tile):
  return pl.ds(tile * COLUMNS, COLUMNS)


def _atoms(tile):
  return pl.ds(tile * ATOMS, ATOMS)
