"""Builds both operands of the weights, once, at load.

The kernel could not: it feeds tensor cores from memory that only the copy
engine writes, and codes made from offsets would have to go through registers
and back.
"""

import jax.numpy as jnp
import numpy as np

from autoematic_jax import formats
from autoematic_jax.errors import QTensorError
from autoematic_jax.pallas_kernels.extended_gemm.block_scaled import (
  BlockScaledWeight,
)
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import GROUPS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import OUTPUTS
from autoematic_jax.pallas_kernels.extended_gemm.sm100.tiles import scale_atoms
from autoematic_jax.pallas_kernels.extended_gemm.stacks import Layers
from autoematic_jax.pallas_kernels.extended_gemm.stacks import check_layers

_LARGEST_LIFTED = 448.0 / 4


def pack_block_scaled(layers: Layers) -> BlockScaledWeight:
  """Stacks layers as the Blackwell kernel takes them.

  Args:
    layers: Of each layer, the tensors `[N_i, K]` that read the same input,
      nvfp4 or autofp6, joined along their outputs; the tensors of a layer have
      one refinement mask, but layers may differ in theirs.

  Returns:
    The same numbers as two passes of E2M1 codes.

  Raises:
    QTensorError: The format has no such form, tensors do not belong together,
      or a quarter of the scales has no E4M3 value.
  """
  check_layers(layers)
  first = layers[0][0]
  mask = np.stack([np.asarray(formats.mask_bits(layer[0])) for layer in layers])
  order, stored_tiles = _group_order(mask)
  refines = first.format == "autofp6"
  packed = [
    _pack_layer(layer, places, stored_tiles, refines)
    for layer, places in zip(layers, order, strict=True)
  ]
  return BlockScaledWeight(
    **{
      name: jnp.asarray(np.stack([layer[name] for layer in packed]))
      for name in ("codes", "scales", "tensor_scale")
    },
    order=jnp.asarray(order),
    mask=jnp.asarray(mask),
    format=first.format,
    decoding=first.decoding,
    inputs=first.columns,
    rows=sum(one.rows for one in layers[0]),
    stored_tiles=stored_tiles,
  )


def _group_order(mask):
  """Groups of each layer, those refined first, and the steps these fill."""
  refined = mask.reshape(len(mask), -1, formats.SUBGROUPS_PER_GROUP).any(-1)
  groups = refined.shape[1]
  places = -(-groups // GROUPS) * GROUPS
  order = np.argsort(~refined, axis=1, kind="stable")
  # One past the last stands for a group of zeros.
  widths = ((0, 0), (0, places - groups))
  order = np.pad(order, widths, constant_values=groups)
  stored_tiles = -(-int(refined.sum(axis=1).max()) // GROUPS)
  return order.astype(np.int32), stored_tiles


def _pack_layer(layer, order, stored_tiles, refines):
  codes = [np.concatenate([_base_codes(q) for q in layer])]
  scale = [np.concatenate([_group_scale(q) for q in layer])]
  lift = np.ones((len(scale[0]), 1), np.float32)
  if refines:
    lift = _lift(scale[0])
    codes.append(np.concatenate([_refining_codes(q) for q in layer]))
    scale = [lift * scale[0], lift * scale[0] / 4]
  tensor_scale = np.concatenate(
    [np.full(q.rows, q.tensor_scale, np.float32) for q in layer]
  )
  places = (order, order[: stored_tiles * GROUPS])
  placed = [
    _place(one, formats.GROUP, where)
    for one, where in zip(codes, places, strict=False)
  ]
  packed = np.asarray(
    formats.pack_nibbles(jnp.asarray(np.concatenate(placed, axis=1)))
  )
  scales = [_place(one, 1, order) for one in scale]
  scales = _whole_tiles(np.concatenate(scales, axis=1))
  return {
    "codes": _whole_tiles(packed),
    "scales": scale_atoms(scales).astype(jnp.float8_e4m3fn),
    "tensor_scale": _whole_tiles(tensor_scale / lift[:, 0]),
  }


def _base_codes(q):
  return np.asarray(formats.unpack_nibbles(q.codes))


def _refining_codes(q):
  """Codes of the second pass, in the order of the columns."""
  codes = _base_codes(q).copy()
  room = formats.with_room(q)
  refined = formats.encode_e2m1(4 * formats.decode_offsets(room, 6))
  # Past the marked columns, room is made of others.
  marked = q.refined * formats.SUBGROUP
  columns = np.asarray(formats.refined_columns(room))[:marked]
  codes[:, columns] = np.asarray(refined)[:, :marked]
  return codes


def _group_scale(q):
  return np.asarray(formats.decode_e4m3(q.group_scale))


def _lift(scale):
  """1 or 4 for each output, by which its scales are multiplied.

  A quarter of a small scale may lie between E4M3 values. Then all scales of
  the output are raised, and its tensor scale falls by as much.
  """
  quarter = scale / 4
  exact = quarter.astype(jnp.float8_e4m3fn).astype(np.float32) == quarter
  exact = exact.all(axis=1, keepdims=True)
  liftable = scale.max(axis=1, keepdims=True) <= _LARGEST_LIFTED
  bad = ~(exact | liftable)
  if bad.any():
    raise QTensorError(
      f"{int(bad.sum())} of {len(scale)} outputs have group scales up to"
      f" {scale[bad[:, 0]].max()} beside others of which a quarter is no E4M3"
      " value (under 0.0625). Convert the weights from full precision, which"
      " leaves none so small, or use 'xla' with expand([qtensor])"
    )
  return np.where(exact, 1, 4).astype(np.float32)


def _place(array, width, order):
  """Groups of `width` columns in another order, with zeros past the last."""
  rows = len(array)
  groups = np.pad(array, ((0, 0), (0, width))).reshape(rows, -1, width)
  return groups[:, order].reshape(rows, -1)


def _whole_tiles(array):
  widths = [(0, 0)] * array.ndim
  widths[0] = (0, -len(array) % OUTPUTS)
  return np.pad(array, widths)
