"""How a product is cut into blocks and steps."""

import dataclasses

from autoematic_jax.pallas_kernels.extended_gemm.block_scaled import (
  BlockScaledWeight,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import ATOM_ROWS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import GROUPS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import OUTPUTS

LARGEST_ROWS = 128
"""Rows of x that a block takes at most."""

_SMALLEST_ROWS = 16
_SHARED_BYTES = 227 * 1024
_BARRIERS_AND_ALIGNMENT = 4096
_DEEPEST = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Sizes of one product.

  Steps of 256 columns have numbers: those of the base come first, and behind
  them one for each of the same columns again, which refines it.

  Attributes:
    rows: Of x in a tile, a power of two from 16 to 128.
    row_tiles: Tiles of rows.
    output_tiles: Tiles of 128 outputs.
    column_tiles: Steps of the base.
    stored_tiles: Refining steps, the first ones, that have codes of their own
      on the weights' side; the others take those of the base.
  """

  rows: int
  row_tiles: int
  output_tiles: int
  column_tiles: int
  stored_tiles: int

  @property
  def depth(self) -> int:
    """Steps in shared memory at once."""
    scales = 2 * ATOM_ROWS * GROUPS
    step = (OUTPUTS + self.rows) * COLUMNS // 2 + scales
    out = 4 * self.rows * OUTPUTS
    free = _SHARED_BYTES - _BARRIERS_AND_ALIGNMENT - out
    return min(_DEEPEST, free // step)


def plan_of(weight: BlockScaledWeight, rows: int) -> Plan:
  """The plan of a product with `rows` rows of x."""
  # Powers of two, so that few programs are compiled.
  tile = 1 << (rows - 1).bit_length()
  tile = min(max(tile, _SMALLEST_ROWS), LARGEST_ROWS)
  return Plan(
    rows=tile,
    row_tiles=-(-rows // tile),
    output_tiles=weight.scales.shape[1],
    column_tiles=weight.order.shape[1] // GROUPS,
    stored_tiles=weight.stored_tiles,
  )
