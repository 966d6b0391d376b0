"""Packed weights as Blackwell's tensor cores read them.

The paper's `[Wq | Wqr]`: E2M1 codes with an E4M3 scale for each 16 columns, and
a second pass over the columns that refines the first, at a quarter of the
scale. Where the weights are refined, the second pass holds 4 times their
offsets' values and meets the activations' base; everywhere else it holds the
base again and meets 4 times what refines the activations.

Groups of columns are sorted so that those with refined weights come first. Only
their second pass is stored; the others have the codes of the first, so that no
more than their scales exist twice.
"""

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, Int, UInt8

from autoematic_jax import formats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaledWeight:
  """Weights `[L, N, K]` of stacked layers, both passes.

  With T steps of 256 columns, S of which have stored codes in the second pass,
  and N rounded up to Np, a multiple of 128:

  Attributes:
    codes: `[L, Np, 128 * (T + S)]` E2M1 codes, the even column in the low
      nibble.
    scales: `[L, Np / 128, 4 * 2 T, 32, 16]` E4M3, as `scale_atoms` orders
      them, of both passes; only `4 T` for nvfp4.
    order: `[L, 16 T]` which group of x each place takes; those past K are
      zero.
    tensor_scale: `[L, Np]` float32, of the tensor that each output belongs to.
    mask: `[L, Kp / 4]` refined subgroups, in the order of x.
    format: Format of the tensors, nvfp4 or autofp6.
    decoding: Step of the offsets.
    inputs: K.
    rows: N.
    stored_tiles: S.
  """

  codes: UInt8[Array, "L N C"]
  scales: Float[Array, "L R A 32 16"]
  order: Int[Array, "L G"]
  tensor_scale: Float[Array, "L N"]
  mask: Bool[Array, "L P"]
  format: formats.Format = dataclasses.field(metadata={"static": True})
  decoding: formats.Decoding = dataclasses.field(metadata={"static": True})
  inputs: int = dataclasses.field(metadata={"static": True})
  rows: int = dataclasses.field(metadata={"static": True})
  stored_tiles: int = dataclasses.field(metadata={"static": True})

  @property
  def levels(self) -> tuple[int, ...]:
    """Levels that rows can run at, ascending."""
    return (4,) if self.format == "nvfp4" else (4, 6)

  @property
  def layers(self) -> int:
    """Stacked layers."""
    return self.codes.shape[0]
