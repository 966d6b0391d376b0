"""Sums over warps, over the blocks of a cluster, and their way to memory.

Everything is added in the order of K, so that a row's bits depend neither on
how many rows there are nor on which warp or block was first.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

from autoematic_jax.pallas_kernels.extended_gemm.fragments import ROWS
from autoematic_jax.pallas_kernels.extended_gemm.sm90.body import Body
from autoematic_jax.pallas_kernels.extended_gemm.sm90.decode import EPILOGUE
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import ROW_TILE
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.mlir import Value


@dataclasses.dataclass(frozen=True)
class Sum:
  """A lane's four sums of 16 rows of weights and 8 of x.

  Attributes:
    tile: Which 16 rows of the block.
    fragment: Which 8 rows of x.
    exists: Whether this warp has them at all.
    values: The sums.
  """

  tile: Value
  fragment: Value
  exists: Value
  values: Sequence[Value]


def write_sums(body: Body, sums: Sequence[Value]) -> None:
  """Adds every warp's sums and stores the block's part of the result."""
  results = _add_warps(body, sums)
  if body.plan.tile.cluster > 1:
    results = _add_cluster(body, results)
  for one in results:
    mlir.when(one.exists, partial(_store, body, one))
  if body.plan.tile.cluster > 1:
    # No block may end while another still reads its shared memory.
    ptx.cluster_barrier()


def _add_warps(body, sums):
  """Adds the warps along K."""
  plan, tile = body.plan, body.plan.tile
  fragments = plan.row_fragments
  parts = tile.tiles * fragments
  first = mlir.mul(body.row_warp, tile.tiles)
  if tile.column_warps == 1:
    return [
      Sum(
        mlir.add(first, part // fragments),
        mlir.const(part % fragments),
        body.active,
        sums[4 * part : 4 * part + 4],
      )
      for part in range(parts)
    ]
  base = mlir.add(mlir.add(body.shared, plan.ring_at), mlir.shl(body.lane, 4))
  base = mlir.add(base, mlir.mul(first, plan.tile_bytes))
  all_tiles = tile.block_tiles * plan.tile_bytes
  mine = mlir.add(base, mlir.mul(body.column_warp, all_tiles))

  def store():
    for part in range(parts):
      ptx.store_shared4_f32(mine, sums[4 * part : 4 * part + 4], part * 512)

  mlir.when(body.active, store)
  ptx.block_barrier()
  out = []
  for turn in range(-(-parts // tile.column_warps)):
    part = mlir.add(body.column_warp, turn * tile.column_warps)
    exists = mlir.both(body.active, mlir.less(part, parts))
    part = mlir.minimum(part, parts - 1)
    address = mlir.add(base, mlir.shl(part, 9))
    total = ptx.load_shared4_f32(address)
    for k in range(1, tile.column_warps):
      total = _added(total, ptx.load_shared4_f32(address, k * all_tiles))
    of_tile = mlir.add(first, mlir.div(part, fragments))
    out.append(Sum(of_tile, mlir.rem(part, fragments), exists, total))
  return out


def _added(a, b):
  return [mlir.add_f32(x, y) for x, y in zip(a, b, strict=True)]


def _place(body, one):
  """Bytes from the first of a block's sums to this lane's of `one`."""
  part = mlir.add(mlir.mul(one.tile, body.plan.row_fragments), one.fragment)
  return mlir.add(mlir.shl(part, 9), mlir.shl(body.lane, 4))


def _add_cluster(body, results):
  """Block r of a cluster adds the sums whose number is r modulo its size."""
  plan, tile = body.plan, body.plan.tile
  own = tile.block_tiles * plan.tile_bytes
  base = mlir.add(body.shared, plan.ring_at + plan.sums_bytes - own)
  for one in results:
    address = mlir.add(base, _place(body, one))
    mlir.when(one.exists, partial(ptx.store_shared4_f32, address, one.values))
  ptx.cluster_barrier()
  rank = mlir.rem(body.split, tile.cluster)
  parts = tile.block_tiles * plan.row_fragments
  out = []
  for turn in range(-(-parts // (tile.cluster * plan.all_warps))):
    index = mlir.add(body.warp, turn * plan.all_warps)
    part = mlir.add(mlir.mul(index, tile.cluster), rank)
    exists = mlir.less(part, parts)
    part = mlir.minimum(part, parts - 1)
    one = Sum(
      mlir.div(part, plan.row_fragments),
      mlir.rem(part, plan.row_fragments),
      exists,
      [],
    )
    address = mlir.add(base, _place(body, one))
    total = ptx.load_peer4_f32(ptx.peer_address(address, 0))
    for peer in range(1, tile.cluster):
      more = ptx.load_peer4_f32(ptx.peer_address(address, peer))
      total = _added(total, more)
    out.append(dataclasses.replace(one, values=total))
  return out


def _store(body, one):
  """A lane's sums are two weight rows, 8 apart, by two rows of x."""
  plan = body.plan
  first_row = mlir.add(
    mlir.shl(mlir.add(body.first_tile, one.tile), 4), body.quad
  )
  for b in range(2):
    m = mlir.add(
      mlir.shl(mlir.and_(body.lane, 3), 1),
      mlir.add(mlir.mul(one.fragment, ROW_TILE), b),
    )
    values = (one.values[b], one.values[2 + b])
    store = partial(_store_row, body, m, first_row, values)
    if plan.m % ROW_TILE:
      mlir.when(mlir.less(m, plan.m), store)
    else:
      store()


def _store_row(body, m, first_row, values):
  plan, tile = body.plan, body.plan.tile
  factor, at = None, m
  if tile.parts > 1:
    # XLA adds the parts, and multiplies.
    part = mlir.div(body.split, tile.cluster)
    at = mlir.add(mlir.mul(part, plan.m), m)
  else:
    factor = ptx.load_global_f32(mlir.offset(body.at["row_scale"], m, 4))
    factor = mlir.mul_f32(factor, mlir.const_f32(EPILOGUE))
  line = mlir.offset(body.at["out"], at, 4 * plan.n)
  for half, value in enumerate(values):
    n = mlir.add(first_row, 8 * half)
    store = partial(_store_one, body, line, n, value, factor)
    if plan.n % (ROWS * tile.block_tiles):
      mlir.when(mlir.less(n, plan.n), store)
    else:
      store()


def _store_one(body, line, n, value, factor):
  if factor is not None:
    scale = mlir.offset(body.weight_scale, n, 4)
    value = mlir.mul_f32(value, factor)
    value = mlir.mul_f32(value, ptx.load_global_f32(scale))
  ptx.store_global_f32(mlir.offset(line, n, 4), value)
