"""Which kernel a GEMM runs, and how it is cut.

Rules that give the fastest of the measured variants at the measured shapes
(docs/kernels.md): every multiprocessor gets a block of 8 to 16 warps, K is cut
inside a block before it is cut between two, and the ring takes all the shared
memory that is left.
"""

import dataclasses

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.extended_gemm.fragments import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import ROWS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import SHARED_BYTES
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Mode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import StreamTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Tile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import WgmmaTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import round_up
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import slot_bytes

STREAM_ROWS = 16
"""Rows of x up to which mma.sync is faster than wgmma."""

MAX_ROWS = 64

_PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""

_STREAM_WARPS = 16
_MAX_TILES = 7
"""More do not fit in the registers of 16 warps."""

_MAX_DEPTH = 8
_BARRIERS = 1024
"""Shared memory kept for the rings' barriers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
  """What the order of the weights depends on.

  Attributes:
    tiles: Tiles of 16 rows that one warp takes.
    slices: Parts of K.
    max_rows: Rows of x that it serves, 16 (by mma.sync) or 64 (by wgmma).
  """

  tiles: int
  slices: int
  max_rows: int


def choose_packing(rows: int, columns: int, max_rows: int) -> Packing:
  """The packing for a weight `[rows, columns]`.

  Raises:
    PrecisionError: `max_rows` is not between 1 and 64.
  """
  if not 1 <= max_rows <= MAX_ROWS:
    raise PrecisionError(
      f"{max_rows=} must be between 1 and {MAX_ROWS}; more rows are multiplied"
      " by XLA, from whichever packing"
    )
  if max_rows > STREAM_ROWS:
    _, splits = _wgmma_blocks(rows, columns)
    return Packing(tiles=1, slices=splits, max_rows=MAX_ROWS)
  tiles, _, column_warps, splits = _stream_blocks(rows, columns)
  return Packing(
    tiles=tiles, slices=column_warps * splits, max_rows=STREAM_ROWS
  )


def choose_tile(weight: FragmentWeight, rows: int, mode: Mode) -> Tile:
  """How to multiply `rows` rows of x by a packed weight.

  Raises:
    PrecisionError: The weight is packed for fewer rows.
  """
  if rows > weight.max_rows:
    raise PrecisionError(
      f"x has {rows} rows; this weight is packed for {weight.max_rows}."
      f" prepack(..., max_rows={MAX_ROWS}) serves up to {MAX_ROWS}"
    )
  if weight.max_rows == STREAM_ROWS:
    cut = _stream_blocks(weight.rows, weight.inputs)
    if (weight.tiles, weight.slices) == (cut[0], cut[2] * cut[3]):
      return _stream_tile(*cut, rows, mode)
    raise PrecisionError(
      f"packed by {weight.tiles} tiles and {weight.slices} slices, which is"
      f" not how [{weight.rows}, {weight.inputs}] is cut; name the tile"
    )
  if mode == "mixed":
    # wgmma cannot mask rows between its products.
    return _stream_tile(1, _STREAM_WARPS, 1, weight.slices, rows, mode)
  warps, splits = _wgmma_blocks(weight.rows, weight.inputs)
  return _wgmma_tile(warps, splits, rows, mode)


def _stream_blocks(rows, columns):
  """Tiles of a warp, warps along N, warps along K, splits."""
  tiles = -(-rows // ROWS)
  a_block = -(-tiles // _PROCESSORS)
  if a_block >= 4:
    row_warps, splits = 2, 1
  else:
    # Too few rows for one block a multiprocessor: two share them.
    row_warps, splits = 1, 2
    a_block = -(-tiles * splits // _PROCESSORS)
  column_warps = _STREAM_WARPS // row_warps
  while column_warps > 1 and columns <= column_warps * splits * COLUMNS:
    column_warps //= 2
  side = min(_MAX_TILES, -(-a_block // row_warps))
  return side, row_warps, column_warps, splits


def _stream_tile(tiles, row_warps, column_warps, splits, rows, mode):
  slot = slot_bytes(tiles * row_warps, rows, mode != "4")
  ring = column_warps * round_up(slot, 128)
  depth = min(_MAX_DEPTH, (SHARED_BYTES - _BARRIERS) // ring)
  return StreamTile(
    tiles=tiles,
    row_warps=row_warps,
    column_warps=column_warps,
    splits=splits,
    depth=depth,
    cluster=_cluster(splits),
  )


def _cluster(splits):
  # Clusters of four are not all resident at once; XLA adds further splits.
  return 2 if splits == 2 else 1


def _wgmma_blocks(rows, columns):
  """Warps of a block and splits that keep most multiprocessors at work."""
  best = []
  for warps in (16, 12, 8):
    blocks = -(-rows // (ROWS * warps))
    for splits in (1, 2, 4, 8):
      crowded = blocks * splits > _PROCESSORS
      if splits > 1 and (crowded or columns < 2 * splits * COLUMNS):
        continue
      waves = -(-blocks * splits // _PROCESSORS)
      # Multiprocessors at work in the mean, then fewer waves.
      busy = rows * splits / (ROWS * warps * waves)
      best.append((busy, -waves, warps, splits))
  _, _, warps, splits = max(best)
  return warps, splits


def _wgmma_tile(warps, splits, rows, mode):
  for group, least in ((4, 3), (2, 2)):
    slot = round_up(slot_bytes(warps, rows, mode != "4", group), 1024)
    depth = min(_MAX_DEPTH, (SHARED_BYTES - _BARRIERS) // slot)
    if depth >= least:
      break
  return WgmmaTile(
    row_warps=warps,
    splits=splits,
    depth=depth,
    group=group,
    cluster=_cluster(splits),
  )
