"""What both kernels share: who does what, and where the weights begin."""

from collections.abc import Sequence

from autoematic_jax.pallas_kernels.extended_gemm.fragments import UNIT_BYTES
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Plan
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.operands import Operands


class Body(Operands):
  """Emits a kernel while it is traced.

  Attributes:
    plan: Static numbers.
  """

  def __init__(self, plan: Plan, names: Sequence[str], *refs: Value):
    super().__init__(names, *refs)
    self.plan = plan
    self.warp = mlir.warp_index()
    self.quad = mlir.shr(self.lane, 2)
    self.leader = mlir.equal(self.lane, 0)
    tile = plan.tile
    self.row_warp, self.column_warp = self.warp, mlir.const(0)
    if tile.column_warps > 1:
      self.row_warp = mlir.rem(self.warp, tile.row_warps)
      self.column_warp = mlir.div(self.warp, tile.row_warps)
    self.split = mlir.rem(self.block, tile.splits)
    self.row_block = mlir.div(self.block, tile.splits)
    self.first_tile = mlir.mul(self.row_block, tile.block_tiles)
    self.active = mlir.less(self.warp, tile.warps)
    self.ring = mlir.add(self.shared, plan.ring_at)
    self.layer = ptx.load_global(self.at["layer"])
    self.weight_scale = mlir.offset(
      self.at["weight_scale"], self.layer, 4 * plan.n
    )

  def find_weights(self, row_warp: Value) -> None:
    """Sets `unit_source` and `offset_source`: where a warp's weights begin."""
    plan, tile = self.plan, self.plan.tile
    part = mlir.add(mlir.mul(self.split, tile.column_warps), self.column_warp)
    # Warps past the last copy nothing; their addresses stay in range.
    part = mlir.minimum(part, tile.slices - 1)
    # The last block may have rows past N: it reads others and writes nothing.
    row = mlir.add(mlir.mul(self.row_block, tile.row_warps), row_warp)
    row = mlir.minimum(row, plan.row_blocks - 1)
    row = mlir.add(mlir.mul(self.layer, plan.row_blocks), row)
    step = mlir.add(
      mlir.mul(row, plan.steps * tile.slices), mlir.mul(part, plan.steps)
    )
    self.unit_source = mlir.offset(
      self.at["units"], step, UNIT_BYTES * tile.tiles
    )
    if plan.refined:
      size = tile.tiles * (128 * plan.doubles + 64 * plan.singles)
      index = mlir.add(mlir.mul(row, tile.slices), part)
      self.offset_source = mlir.offset(self.at["offsets"], index, size)

  def load_unit(
    self, units: Value, at: int, offsets: Value, offsets_at: int, kind: int
  ) -> tuple[Sequence[Value], tuple[Value, Value], Value | None]:
    """This lane's words, scales and offsets of one unit in shared memory.

    Args:
      units: Where this warp's units begin.
      at: Bytes from there to the unit.
      offsets: Where this warp's offsets begin.
      offsets_at: Bytes from there to those of the unit.
      kind: Refined words of the unit; where 0, it has no offsets.
    """
    words = ptx.load_shared4(mlir.add(units, mlir.shl(self.lane, 4)), at)
    scale = ptx.load_shared16(mlir.add(units, mlir.shl(self.lane, 1)), at + 512)
    scales = decode.decode_scales(scale)
    if not kind:
      return words, scales, None
    load = ptx.load_shared if kind == 2 else ptx.load_shared16
    own = mlir.add(offsets, mlir.shl(self.lane, kind))
    return words, scales, load(own, offsets_at)

  def touch_row_scale(self) -> None:
    """The factors are wanted at the end; their latency passes meanwhile."""
    row = mlir.minimum(self.thread, self.plan.m - 1)
    ptx.touch(mlir.offset(self.at["row_scale"], row, 4))

  def next_slot(self, slot: Value, parity: Value) -> list[Value]:
    """The ring's next slot and the parity of its phase."""
    end = mlir.equal(slot, self.plan.tile.depth - 1)
    flipped = mlir.sub(mlir.const(1), parity)
    slot = mlir.select(end, mlir.const(0), mlir.add(slot, 1))
    return [slot, mlir.select(end, flipped, parity)]

  def slot_before(self, slot: Value) -> Value:
    """The slot that was read before this one."""
    last = mlir.const(self.plan.tile.depth - 1)
    return mlir.select(mlir.equal(slot, 0), last, mlir.sub(slot, 1))
