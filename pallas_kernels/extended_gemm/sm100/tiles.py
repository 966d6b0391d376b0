"""Sizes that the instruction and its operands are cut into.

The tensor core takes 64 columns at once: of each operand 4-bit codes, two a
byte and the first in the low bits, and four scales a row. Scales of 128 rows by
64 columns are an atom of 512 bytes, in which row r has its four at lane r % 32
and place r // 32.
"""

import math

import numpy as np
from jaxtyping import Array, Float

from autoematic_jax import formats

OUTPUTS = 128
"""Weight rows of a block: the height of the instruction."""
COLUMNS = 256
"""Of a step: 128 bytes of codes, the widest row that memory is swizzled by."""
GROUPS = COLUMNS // formats.GROUP
ATOM_ROWS = 128
ATOM_GROUPS = 4
ATOM_LANES = 32
ATOMS = GROUPS // ATOM_GROUPS
"""Of a step."""


def scale_atoms(
  scales: Float[Array | np.ndarray, "*B R G"],
) -> Float[Array | np.ndarray, "*B T A 32 16"]:
  """Scales in the order in which tensor cores read them.

  Args:
    scales: R is a multiple of 128 and G of 4.

  Returns:
    `[..., R / 128, G / 4, 32, 16]` of the same type.
  """
  *lead, rows, groups = scales.shape
  places = ATOM_ROWS // ATOM_LANES
  cut = scales.reshape(
    *lead,
    rows // ATOM_ROWS,
    places,
    ATOM_LANES,
    groups // ATOM_GROUPS,
    ATOM_GROUPS,
  )
  # tile, atom, lane, place, group
  axes = [len(lead) + axis for axis in (0, 3, 2, 1, 4)]
  cut = cut.transpose(*range(len(lead)), *axes)
  return cut.reshape(*cut.shape[:-2], math.prod(cut.shape[-2:]))
