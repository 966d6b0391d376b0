"""Weights expanded once at load for hardware without a 4-bit decoder."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8

from autoematic_jax import formats
from autoematic_jax.errors import QTensorError

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpandedWeight:
  """A weight `[N, K]` in a form that a CPU decodes quickly.

  The base weight of output n and input k is
  `codes[n, k] * group_scale[n, k // 16] * tensor_scale[n]`; the
  level of a row adds `refinement6[n, i]` (or `refinement8[n, i]`) at input
  `columns[i]`, in the same scale before `tensor_scale`. Arrays may carry
  a leading axis for stacked layers.

  Attributes:
    codes: `[..., N, Kp]` twice the E2M1 value (8 times the E2M3 value).
    group_scale: `[..., N, Kp / 16]` float32, decoded E4M3.
    tensor_scale: `[..., N]` float32, divided by `code_unit`.
    columns: `[..., C]` int32 refined inputs, C = 4 a refined subgroup.
    refinement6: `[..., N, C]` float16 `delta * code_unit * group_scale`
      (exact), or None.
    refinement8: The same at 8 bits, or None.
    mask: `[..., Kp / 4]` refined subgroups.
    format: Format of the tensor.
    decoding: Step of the offsets.
    inputs: K before padding.
  """

  codes: Int8[Array, "*L N Kp"]
  group_scale: Float[Array, "*L N G"]
  tensor_scale: Float[Array, "*L N"]
  columns: Int[Array, "*L C"]
  refinement6: Float[Array, "*L N C"] | None
  refinement8: Float[Array, "*L N C"] | None
  mask: Bool[Array, "*L S"]
  format: formats.Format = dataclasses.field(metadata={"static": True})
  decoding: formats.Decoding = dataclasses.field(metadata={"static": True})
  inputs: int = dataclasses.field(metadata={"static": True})

  @property
  def code_unit(self) -> float:
    """Codes per unit of element value."""
    return 8.0 if self.format == "fp6g" else 2.0

  @property
  def levels(self) -> tuple[int, ...]:
    """Levels that rows can run at, ascending."""
    return formats.LEVELS[self.format]

  @property
  def outputs(self) -> int:
    return self.codes.shape[-2]

  def refinement(self, level: int) -> Float[Array, "*L N C"] | None:
    """What rows at 6 or 8 bits add in the refined columns."""
    return {6: self.refinement6, 8: self.refinement8}[level]


RAGGED_FIELDS = ("columns", "refinement6", "refinement8")
"""Fields whose last axis differs between layers that refine more and less.

Stacked, they are padded with zeros, which add nothing to a product.
"""

_OUTPUT_AXIS = {
  "codes": -2,
  "group_scale": -2,
  "tensor_scale": -1,
  "refinement6": -2,
  "refinement8": -2,
}


def expand(weights: Sequence[formats.QTensor]) -> ExpandedWeight:
  """Joins tensors that read the same input and expands them.

  Args:
    weights: Tensors `[N_i, K]` of one format and one refinement mask; each
      keeps its own tensor scale.

  Returns:
    The expanded `[sum N_i, K]` weight.

  Raises:
    QTensorError: Formats, decodings, widths or masks differ.
  """
  refined = weights[0].refined
  weights = [formats.with_room(weight) for weight in weights]
  first = weights[0]
  for other in weights[1:]:
    differ = formats.difference(first, other)
    if differ:
      raise QTensorError(
        f"tensors joined along their outputs differ in {differ}"
      )
    if not np.array_equal(formats.mask_bits(first), formats.mask_bits(other)):
      raise QTensorError(
        "tensors joined along their outputs have different refinement masks"
      )
  columns, mask = _refined(first)
  parts = [_expand_one(weight, columns) for weight in weights]
  joined: dict[str, Any] = {
    name: None
    if parts[0][name] is None
    else jnp.concatenate([part[name] for part in parts], axis=axis)
    for name, axis in _OUTPUT_AXIS.items()
  }
  joined["columns"] = columns
  for name in RAGGED_FIELDS:
    if joined[name] is not None:
      kept = np.asarray(joined[name])[..., : refined * formats.SUBGROUP]
      joined[name] = jax.device_put(kept)
  return ExpandedWeight(
    **joined,
    mask=jnp.asarray(mask),
    format=first.format,
    decoding=first.decoding,
    inputs=first.columns,
  )


def at_layer(stacked: Tree, layer: Int[Array, ""]) -> Tree:
  """One layer of arrays that are stacked along a leading axis."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), stacked
  )


def _refined(weight):
  """Refined columns `[..., C]` and mask `[..., Kp / 4]` of a tensor."""
  lead = weight.codes.shape[:-2]
  if weight.refinement_mask is None:
    subgroups = weight.padded_columns // formats.SUBGROUP
    return np.zeros((*lead, 0), np.int32), np.zeros((*lead, subgroups), bool)
  return formats.refined_columns(weight), formats.mask_bits(weight)


@jax.jit
def _expand_one(weight, columns):
  unit = 8.0 if weight.format == "fp6g" else 2.0
  codes = jnp.round(formats.decode_base(weight) * unit).astype(jnp.int8)
  scale = formats.decode_e4m3(weight.group_scale)
  rows = weight.codes.shape[-2]
  lead = weight.codes.shape[:-2]
  tensor_scale = jnp.broadcast_to(
    jnp.asarray(weight.tensor_scale)[..., None] / unit, (*lead, rows)
  )
  refinements = {}
  for level in (6, 8):
    refinements[f"refinement{level}"] = None
    if weight.offsets is not None and level in weight.levels:
      delta = formats.decode_offsets(weight, level)
      column_scale = jnp.take_along_axis(
        scale, jnp.asarray(columns)[..., None, :] // formats.GROUP, axis=-1
      )
      # At most 3 bits of offset times E4M3's 4, from 2^-14 up: exact.
      refinements[f"refinement{level}"] = (delta * unit * column_scale).astype(
        jnp.float16
      )
  return {
    "codes": codes,
    "group_scale": scale,
    "tensor_scale": tensor_scale,
    **refinements,
  }
