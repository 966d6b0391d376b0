"""Brings packed weights into the order of `fragments.py`, once, at load."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, UInt8, UInt32

from autoematic_jax import formats
from autoematic_jax.errors import QTensorError
from autoematic_jax.pallas_kernels.extended_gemm.fragments import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import GROUPS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import MAGNITUDE_BITS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import ROWS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import SIGN_BITS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import UNIT_WORDS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import Packing
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import (
  choose_packing,
)
from autoematic_jax.pallas_kernels.extended_gemm.stacks import Layers
from autoematic_jax.pallas_kernels.extended_gemm.stacks import check_layers


def prepack(
  layers: Layers,
  *,
  max_rows: int = 16,
  packing: Packing | None = None,
) -> FragmentWeight:
  """Stacks layers in fragment order, for the Hopper kernels.

  Args:
    layers: Of each layer, the tensors `[N_i, K]` that read the same input,
      nvfp4 or autofp6, joined along their outputs; the tensors of a layer have
      one refinement mask, but layers may differ in theirs.
    max_rows: Rows of x in the largest decode batch, at most 64. Packed for 16
      or fewer, those run a few percent faster.
    packing: How to cut the weight, instead of what suits its shape.

  Returns:
    The same numbers in fragment order.

  Raises:
    QTensorError: The format has no such order, tensors do not belong together,
      or a group has more than two refined subgroups.
    PrecisionError: `max_rows` is over 64.
  """
  first = layers[0][0]
  check_layers(layers)
  joined = [_join(layer) for layer in layers]
  rows = joined[0]["codes"].shape[0]
  packing = packing or choose_packing(rows, first.columns, max_rows)
  mask = np.stack([np.asarray(formats.mask_bits(q[0])) for q in layers])
  order = column_order(mask, packing.slices)
  stack = {
    name: jnp.stack([layer[name] for layer in joined])
    for name in ("codes", "group_scale", "tensor_scale")
  }
  offsets = None
  if order.doubles + order.singles:
    widest = max(layer["offsets"].shape[1] for layer in joined)
    offsets = _offsets(
      jnp.stack([_padded(one["offsets"], 1, widest) for one in joined]),
      jnp.asarray(mask),
      order.sources,
      (packing.slices, packing.tiles, order.doubles, order.singles),
    )
  return FragmentWeight(
    units=_units(
      stack["codes"], stack["group_scale"], order.sources, packing.tiles
    ),
    offsets=offsets,
    sources=jnp.asarray(order.sources),
    tensor_scale=stack["tensor_scale"],
    mask=jnp.asarray(mask),
    format=first.format,
    decoding=first.decoding,
    inputs=first.columns,
    rows=rows,
    max_rows=packing.max_rows,
    tiles=packing.tiles,
    slices=packing.slices,
    doubles=order.doubles,
    singles=order.singles,
  )


def _join(layer):
  """Arrays of a layer's tensors, joined along their outputs."""
  out = {
    "codes": jnp.concatenate([one.codes for one in layer]),
    "group_scale": jnp.concatenate([one.group_scale for one in layer]),
    "tensor_scale": jnp.concatenate(
      [jnp.full((one.rows,), one.tensor_scale, jnp.float32) for one in layer]
    ),
  }
  if layer[0].offsets is not None:
    out["offsets"] = jnp.concatenate([one.offsets for one in layer])
  return out


@dataclasses.dataclass(frozen=True)
class ColumnOrder:
  """Where columns go.

  Attributes:
    sources: `[L, subgroups]` int32 the subgroup that lies at each place.
    doubles: Steps of each slice with two refined words.
    singles: Steps of each slice with one.
  """

  sources: np.ndarray
  doubles: int
  singles: int


def column_order(mask: np.ndarray, slices: int) -> ColumnOrder:
  """The order of subgroups for masks `[L, subgroups]` of stacked layers."""
  layers, subgroups = mask.shape
  whole = slices * COLUMNS // formats.SUBGROUP
  padded = -(-subgroups // whole) * whole
  mask = np.pad(mask, ((0, 0), (0, padded - subgroups)))
  if not mask.any():
    sources = np.broadcast_to(np.arange(padded, dtype=np.int32), mask.shape)
    return ColumnOrder(sources, 0, 0)
  refined = mask.reshape(layers, -1, formats.SUBGROUPS_PER_GROUP)
  count = refined.sum(axis=-1)
  if count.max() > 2:
    raise QTensorError("a group has more than two refined subgroups")
  by_count = np.argsort(-count, axis=1, kind="stable")
  # Dealt in turn: slice s takes the groups s, s + slices, ... of that order.
  groups = by_count.reshape(layers, -1, slices).transpose(0, 2, 1)
  groups = groups.reshape(layers, -1, 1)
  inside = np.argsort(~refined, axis=-1, kind="stable")
  inside = np.take_along_axis(inside, groups, axis=1)
  sources = groups * formats.SUBGROUPS_PER_GROUP + inside
  steps = [
    -(-int((count >= least).sum(axis=1).max()) // (slices * GROUPS))
    for least in (2, 1)
  ]
  sources = sources.reshape(layers, -1).astype(np.int32)
  return ColumnOrder(sources, steps[0], steps[1] - steps[0])


def _padded(array, axis, size, value=0):
  widths = [(0, 0)] * array.ndim
  widths[axis] = (0, size - array.shape[axis])
  return jnp.pad(array, widths, constant_values=value)


def _take(array, columns):
  """Columns of `[L, N, X, ...]`, other ones for every layer."""
  return jax.vmap(partial(jnp.take, axis=1))(array, columns)


def _row_tiles(array, tiles, value=0):
  """`[L, N, X]` to `[L, count, 2, 8, X]`: rows r and r + 8 side by side."""
  whole = tiles * ROWS
  rows = -(-array.shape[1] // whole) * whole
  array = _padded(array, 1, rows, value)
  return array.reshape(array.shape[0], -1, 2, 8, array.shape[2])


@partial(jax.jit, static_argnums=3)
def _units(
  codes: UInt8[Array, "L N C"],
  group_scale: Array,
  sources: Int[Array, "L Q"],
  side_by_side: int,
) -> UInt32[Array, "L R S T W"]:
  subgroups = sources.shape[1]
  steps = subgroups * formats.SUBGROUP // COLUMNS
  codes = _padded(codes, 2, 2 * subgroups)
  # Two bytes are a subgroup.
  codes = codes.reshape(*codes.shape[:2], subgroups, 2)
  codes = _take(codes, sources)
  tiles = _row_tiles(codes.reshape(*codes.shape[:2], -1), side_by_side)
  layers, count = tiles.shape[:2]
  # h, r, step, group, word, column pair
  tiles = tiles.reshape(layers, count, 2, 8, steps, GROUPS, 4, 2)
  words = jnp.zeros((layers, count, 8, steps, GROUPS, 4), jnp.uint32)
  for n in range(4):
    pair, half = divmod(n, 2)
    for b in range(2):
      code = (tiles[:, :, half, ..., pair] >> (4 * b)).astype(jnp.uint32) & 15
      words |= (code & 7) << (MAGNITUDE_BITS[n] + 16 * b)
      words |= (code >> 3) << (SIGN_BITS[n] + 16 * b)
  words = words.transpose(0, 1, 3, 2, 4, 5).reshape(layers, count, steps, -1)
  scale = lax.bitcast_convert_type(group_scale, jnp.uint8)
  # 0x38 is 1.
  scale = _padded(scale, 2, steps * GROUPS, 0x38)
  scale = _take(scale, sources[:, ::4] // 4)
  scale = _row_tiles(scale, side_by_side, 0x38)
  scale = scale.reshape(layers, count, 2, 8, steps, GROUPS)
  scale = scale.transpose(0, 1, 4, 3, 5, 2).reshape(layers, count, steps, 16, 4)
  scale = lax.bitcast_convert_type(scale, jnp.uint32)
  units = jnp.concatenate([words, scale], axis=-1)
  units = units.reshape(layers, -1, side_by_side, steps, UNIT_WORDS)
  return units.swapaxes(2, 3)


@partial(jax.jit, static_argnums=3)
def _offsets(offsets, mask, sources, shape):
  slices, tiles, doubles, singles = shape
  layers, subgroups = sources.shape
  padded = jnp.pad(mask, ((0, 0), (0, subgroups - mask.shape[1])))
  place = jnp.maximum(jnp.cumsum(padded, axis=1) - 1, 0)
  place = jnp.take_along_axis(place, sources, axis=1)
  own = jnp.take_along_axis(padded, sources, axis=1)
  steps = subgroups * formats.SUBGROUP // COLUMNS // slices
  index = jnp.arange(subgroups).reshape(slices, steps, GROUPS, 4)

  def gather(first, last, words):
    """Bytes `[L, tiles, slices, steps, 8, group, words, 4]` of some steps."""
    wanted = index[:, first:last, :, :words].reshape(-1)
    raw = _take(offsets, place[:, wanted])
    # d + 2 in two bits is d with its upper bit flipped; d = 0 is 2.
    raw = jnp.where(own[:, None, wanted], raw ^ 0xAA, 0xAA)
    raw = _row_tiles(raw, tiles, 0xAA)
    count = raw.shape[1]
    raw = raw.reshape(layers, count, 2, 8, slices, last - first, GROUPS, words)
    out = []
    for b in range(2):
      byte = jnp.zeros(raw[:, :, 0].shape, jnp.uint8)
      for n in range(4):
        pair, half = divmod(n, 2)
        bits = (raw[:, :, half] >> (2 * (2 * pair + b))) & 3
        byte |= bits << (6 - 2 * n)
      out.append(byte)
    both = jnp.stack(out, axis=-1)  # L tiles 8 slices steps group words 2
    both = both.transpose(0, 1, 3, 4, 2, 5, 6, 7)
    both = both.reshape(layers, -1, tiles, slices, last - first, 64 * words)
    both = both.transpose(0, 1, 3, 4, 2, 5)
    both = both.reshape(*both.shape[:3], -1, 4)
    return lax.bitcast_convert_type(both, jnp.uint32)

  parts = []
  if doubles:
    parts.append(gather(0, doubles, 2))
  if singles:
    parts.append(gather(doubles, doubles + singles, 1))
  return jnp.concatenate(parts, axis=-1)
