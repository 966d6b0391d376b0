"""How a GEMM is cut into blocks and warps, and where things lie in a block."""

import dataclasses
from typing import Literal

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.extended_gemm.fragments import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import UNIT_BYTES
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import ROW_TILE

Mode = Literal["4", "6", "mixed"]
"""`4` or `6` where all rows run at that level, `mixed` where both may occur."""

SHARED_BYTES = 232448 - 1024
"""Shared memory of a block; Mosaic keeps some for itself."""

_OFFSET_BYTES = 128
"""Offsets of a unit with two refined words."""


def round_up(size: int, to: int) -> int:
  """The least multiple of `to` that is no less than `size`."""
  return -(-size // to) * to


class _Cut:
  """What follows from either way to cut a GEMM."""

  tiles: int
  row_warps: int
  column_warps: int
  splits: int
  cluster: int

  @property
  def slices(self) -> int:
    """Parts into which K is cut."""
    return self.splits * self.column_warps

  @property
  def parts(self) -> int:
    """Sums of each element that the kernel leaves."""
    return self.splits // self.cluster

  @property
  def warps(self) -> int:
    """Warps that multiply."""
    return self.row_warps * self.column_warps

  @property
  def block_tiles(self) -> int:
    """Tiles of 16 weight rows of a block."""
    return self.tiles * self.row_warps


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamTile(_Cut):
  """Products by mma.sync; rows of x pass through the ring with the weights.

  Attributes:
    tiles: Tiles of 16 weight rows that a warp multiplies by one x fragment.
    row_warps: Warps of a block side by side along N, which share a ring.
    column_warps: Warps of a block side by side along K.
    splits: Blocks side by side along K.
    depth: Steps of 64 columns in a ring.
    cluster: Blocks along K that add their sums in shared memory; a divisor of
      `splits`. Where it is smaller, XLA adds the rest.
  """

  tiles: int
  row_warps: int
  column_warps: int
  splits: int
  depth: int
  cluster: int = 1

  @property
  def warpgroups(self) -> int:
    """Groups of four warps."""
    return -(-self.warps // 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgmmaTile(_Cut):
  """Products by wgmma; one ring for a block, filled by a warp of its own.

  Attributes:
    row_warps: Warps that multiply, a multiple of 4 side by side along N; each
      takes one tile of 16 weight rows.
    splits: Blocks side by side along K.
    depth: Slots of the ring.
    group: Steps of 64 columns in one slot.
    cluster: As for `StreamTile`.
  """

  row_warps: int
  splits: int
  depth: int
  group: int
  cluster: int = 1

  def __post_init__(self):
    if self.row_warps % 4:
      raise PrecisionError(f"{self.row_warps=} must be whole warpgroups of 4")

  tiles = 1
  column_warps = 1

  @property
  def warpgroups(self) -> int:
    """Groups of four warps, that of the copying warp included."""
    return self.row_warps // 4 + 1


Tile = StreamTile | WgmmaTile


def slot_bytes(
  tile_rows: int, x_rows: int, refined: bool, group: int = 1
) -> int:
  """Shared memory of one slot of a ring.

  Args:
    tile_rows: Tiles of 16 weight rows whose warps share the ring.
    x_rows: Rows of x.
    refined: Whether offsets come along.
    group: Steps of a slot.
  """
  unit = UNIT_BYTES + (_OFFSET_BYTES if refined else 0)
  return group * (tile_rows * unit + round_up(x_rows, ROW_TILE) * 2 * COLUMNS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static numbers of one kernel.

  Attributes:
    m: Rows of x.
    n: Rows of the weight.
    k: Columns of x.
    row_blocks: Groups of `tile.tiles` tiles in which the weight is packed.
    steps: Steps of 64 columns of a slice.
    doubles: How many of them have two refined words.
    singles: How many have one.
    exponent: Whether the offsets' step grows with the value.
    mode: Levels of the rows.
    tile: How the work is cut.
  """

  m: int
  n: int
  k: int
  row_blocks: int
  steps: int
  doubles: int
  singles: int
  exponent: bool
  mode: Mode
  tile: Tile

  @property
  def row_fragments(self) -> int:
    return -(-self.m // ROW_TILE)

  @property
  def refined(self) -> bool:
    return self.mode != "4"

  @property
  def parts(self) -> list[tuple[int, int, int]]:
    """Runs of steps alike: first, one past the last, refined words."""
    ends = (self.doubles, self.doubles + self.singles, self.steps)
    if not self.refined:
      ends = (0, 0, self.steps)
    runs = zip((0, *ends[:2]), ends, (2, 1, 0), strict=True)
    return [run for run in runs if run[1] > run[0]]

  @property
  def warp_bytes(self) -> int:
    """A warp's weights of one step."""
    return self.tile.tiles * (
      UNIT_BYTES + (_OFFSET_BYTES if self.refined else 0)
    )

  @property
  def slot_bytes(self) -> int:
    tile = self.tile
    if isinstance(tile, WgmmaTile):
      size = slot_bytes(tile.row_warps, self.m, self.refined, tile.group)
      return round_up(size, 1024)
    size = slot_bytes(tile.block_tiles, self.m, self.refined)
    return round_up(size, 128)

  @property
  def rings(self) -> int:
    return self.tile.column_warps

  @property
  def blocks(self) -> int:
    """Blocks along N."""
    return -(-self.row_blocks // self.tile.row_warps)

  @property
  def all_warps(self) -> int:
    """Warps that can add sums of a cluster."""
    if isinstance(self.tile, WgmmaTile):
      return self.tile.warps
    return 4 * self.tile.warpgroups

  @property
  def tile_bytes(self) -> int:
    """Sums of one tile of 16 weight rows."""
    return self.row_fragments * 512

  @property
  def ring_at(self) -> int:
    """Where the rings begin, after their barriers."""
    if isinstance(self.tile, WgmmaTile):
      return 1024
    return round_up(8 * self.rings * self.tile.depth + 16, 128)

  @property
  def x_step_bytes(self) -> int:
    """Rows of x by 64 columns."""
    return ROW_TILE * self.row_fragments * 2 * COLUMNS

  @property
  def sums_bytes(self) -> int:
    """Of every warp, then of the block."""
    parts = self.tile.column_warps if self.tile.column_warps > 1 else 0
    parts += int(self.tile.cluster > 1)
    return parts * self.tile.block_tiles * self.tile_bytes

  @property
  def shared_bytes(self) -> int:
    ring = self.rings * self.tile.depth * self.slot_bytes
    size = self.ring_at + max(ring, self.sums_bytes)
    if size > SHARED_BYTES:
      raise PrecisionError(
        f"{self.tile} with {self.m} rows needs {size} bytes of shared memory; a"
        f" block has {SHARED_BYTES}. Take a smaller depth or fewer tiles"
      )
    return round_up(size, 128)
