"""The activations' operand, `[Aq | Aqr]`, and the steps that have any of it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from autoematic_jax import formats
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.extended_gemm.sm100.plan import Plan
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOM_ROWS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import scale_atoms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOperands:
  """What the kernel reads of the activations.

  With T steps of the base, M rounded up to Mp, a multiple of a tile's rows:

  Attributes:
    codes: `[Mp, 128 * 2 T]` E2M1 codes, or `128 * T` where no row is refined.
    scales: `[tiles, 4 * T, 32, 16]` E4M3 of each tile of rows, as
      `scale_atoms` orders them; both passes have the same.
    tensor_scale: `[Mp]` float32.
    steps: `[tiles, 2 T]` numbers of the steps to run, as in `Plan`.
    counts: `[tiles]` how many of them.
  """

  codes: UInt8[Array, "Mp C"]
  scales: Float[Array, "R A 32 16"]
  tensor_scale: Float[Array, "Mp"]
  steps: Int[Array, "R S"]
  counts: Int[Array, "R"]


@partial(jax.jit, static_argnames=("plan", "refine"))
def row_operands(
  rows: QuantizedRows,
  mask: Bool[Array, "P"],
  order: Int[Array, "G"],
  plan: Plan,
  *,
  refine: bool,
) -> RowOperands:
  """Operands of rows at their levels.

  A row at 4 bits has zeros in the second pass. A step of the second pass in
  which a tile of rows has nothing else is left out.

  Args:
    rows: Refined only where the weights are not.
    mask: Subgroups that the weights refine.
    order: Which group each place takes.
    plan: How rows are cut.
    refine: Whether any row may be at 6 bits.
  """
  passes = [rows.values]
  if refine:
    refined = jnp.repeat(mask, formats.SUBGROUP)
    second = jnp.where(refined, rows.values, 4 * rows.delta)
    passes.append(jnp.where((rows.levels >= 6)[:, None], second, 0.0))
  codes = [
    _place(formats.encode_e2m1(one), formats.GROUP, order, plan)
    for one in passes
  ]
  scales = _place(rows.group_scale, 1, order, plan)
  steps, counts = _steps(codes, plan)
  return RowOperands(
    codes=formats.pack_nibbles(jnp.concatenate(codes, axis=1)),
    scales=_tile_atoms(scales, plan),
    tensor_scale=_whole_tiles(rows.tensor_scale[:, 0], plan),
    steps=steps,
    counts=counts,
  )


def _place(array, width, order, plan):
  """Groups of `width` columns in the order of the weights', whole tiles."""
  groups = array.reshape(len(array), -1, width)
  groups = jnp.pad(groups, ((0, 0), (0, 1), (0, 0)))
  placed = jnp.take(groups, order, axis=1).reshape(len(array), -1)
  return _whole_tiles(placed, plan)


def _whole_tiles(array, plan):
  missing = plan.row_tiles * plan.rows - len(array)
  return jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))


def _steps(passes, plan):
  """Steps of each tile: all of the base, then the second pass's that count."""
  base = jnp.arange(plan.column_tiles)
  base = jnp.broadcast_to(base, (plan.row_tiles, plan.column_tiles))
  counts = jnp.full((plan.row_tiles,), plan.column_tiles)
  steps = [base]
  for second in passes[1:]:
    # Without the sign: -0 refines nothing.
    something = (second & 7) != 0
    shape = (plan.row_tiles, plan.rows, plan.column_tiles, COLUMNS)
    something = something.reshape(shape).any(axis=(1, 3))
    first = jnp.argsort(~something, axis=1, stable=True)
    steps.append(first + plan.column_tiles)
    counts += something.sum(axis=1)
  steps = jnp.concatenate(steps, axis=1)
  return steps.astype(jnp.int32), counts.astype(jnp.int32)


def _tile_atoms(scales, plan):
  """Each tile of rows fills the first rows of its atoms."""
  tiles = scales.reshape(plan.row_tiles, plan.rows, -1)
  tiles = jnp.pad(tiles, ((0, 0), (0, ATOM_ROWS - plan.rows), (0, 0)))
  return formats.encode_e4m3(jnp.asarray(scale_atoms(tiles))[:, 0])
