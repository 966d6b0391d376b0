"""Packed weights in the order in which the sm_90a kernels hold them.

A unit is 16 rows by 64 columns. Lane l of a warp holds rows l / 4 and
l / 4 + 8 of the group of 16 columns l % 4, so that its 32 values share two
scales. A 32-bit word is what one mma of 16 columns takes from a lane: the four
columns of one subgroup in both rows. The mma therefore meets the columns in
another order than memory, which rows of x follow.

Where subgroups are refined, groups are sorted by how many of their subgroups
are (two, one, none), dealt to slices of K in turn, and refined subgroups come
first in their group: a step of 64 columns then needs offsets for its first two
words, its first, or none, the same in every lane.
"""

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

from autoematic_jax import formats

ROWS = 16
COLUMNS = 64
UNIT_WORDS = 144
UNIT_BYTES = 4 * UNIT_WORDS
GROUPS = COLUMNS // formats.GROUP
MAGNITUDE_BITS = (9, 1, 4, 12)
"""Where a word holds the magnitudes of (pair, half) = (0, 0), (0, 1), ..."""
SIGN_BITS = (15, 7, 0, 8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FragmentWeight:
  """Weights `[L, N, K]` of stacked layers in fragment order.

  Layers may refine different numbers of subgroups. Every layer has the steps
  of the one that needs most; offsets of 0 fill what a layer does not refine.

  Attributes:
    units: `[L, N / (16 * tiles), steps, tiles, 144]`: 4 words a lane, then 2
      bytes of E4M3 scales a lane.
    offsets: `[L, N / (16 * tiles), slices, O]`: of each slice, 4 bytes a tile
      and lane for `doubles` steps, then 2 bytes for `singles` steps; None
      where nothing is refined.
    sources: `[L, subgroups]` which subgroup of x each place takes; those past
      K are zero.
    tensor_scale: `[L, N]` float32, of the tensor that each output belongs to.
    mask: `[L, Kp / 4]` refined subgroups, in the order of x.
    format: Format of the tensors, nvfp4 or autofp6.
    decoding: Step of the offsets.
    inputs: K.
    rows: N.
    max_rows: Rows of x that the decode kernels take at most.
    tiles: Tiles of 16 rows that one warp takes, side by side in memory.
    slices: Parts of K that are alike in their number of refined steps.
    doubles: Steps of a slice with two refined words.
    singles: Steps of a slice with one.
  """

  units: UInt32[Array, "L R S T W"]
  offsets: UInt32[Array, "L R C O"] | None
  sources: Int[Array, "L Q"]
  tensor_scale: Float[Array, "L N"]
  mask: Bool[Array, "L P"]
  format: formats.Format = dataclasses.field(metadata={"static": True})
  decoding: formats.Decoding = dataclasses.field(metadata={"static": True})
  inputs: int = dataclasses.field(metadata={"static": True})
  rows: int = dataclasses.field(metadata={"static": True})
  max_rows: int = dataclasses.field(metadata={"static": True})
  tiles: int = dataclasses.field(metadata={"static": True})
  slices: int = dataclasses.field(metadata={"static": True})
  doubles: int = dataclasses.field(metadata={"static": True})
  singles: int = dataclasses.field(metadata={"static": True})

  @property
  def levels(self) -> tuple[int, ...]:
    """Levels that rows can run at, ascending."""
    return (4,) if self.format == "nvfp4" else (4, 6)

  @property
  def layers(self) -> int:
    """Stacked layers."""
    return self.units.shape[0]
