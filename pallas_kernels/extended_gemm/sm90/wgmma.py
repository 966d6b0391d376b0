"""Products by wgmma, for more rows of x, all at one level.

One ring holds weights and x of a block, filled by a warp of its own. A slot
holds several steps, so that warps rarely meet barriers or compute addresses:
x of all steps, then of each warp its units, then of each its offsets. Products
of one step run while the next step's weights are decoded.
"""

from functools import partial

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.extended_gemm.fragments import UNIT_BYTES
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.body import Body
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import WgmmaTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.sums import write_sums
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx


class WgmmaBody(Body):
  """Emits the kernel; see the module."""

  @property
  def tile(self) -> WgmmaTile:
    """How the work is cut."""
    tile = self.plan.tile
    if not isinstance(tile, WgmmaTile) or self.plan.mode == "mixed":
      raise PrecisionError(
        f"wgmma takes all rows at one level, not {self.plan.mode}, cut by a"
        f" WgmmaTile, not by {tile}"
      )
    return tile

  def emit(self) -> None:
    """Everything, in order."""
    plan, tile = self.plan, self.tile
    self.full = mlir.add(self.shared, 16)
    self.empty = mlir.add(self.full, 8 * tile.depth)
    self.units_at = tile.group * plan.x_step_bytes
    self.offsets_at = self.units_at + tile.row_warps * tile.group * UNIT_BYTES

    def init():
      for slot in range(tile.depth):
        ptx.barrier_init(mlir.add(self.full, 8 * slot), 1)
        ptx.barrier_init(mlir.add(self.empty, 8 * slot), tile.warps)
      ptx.barrier_init_fence()

    mlir.when(mlir.equal(self.thread, 0), init)
    ptx.block_barrier()
    mlir.when(self.active, self._consume)
    mlir.when(mlir.less(mlir.const(tile.warps - 1), self.warp), self._others)

  def _consume(self):
    self.touch_row_scale()
    sums = self._main_loop()
    ptx.block_barrier()
    write_sums(self, sums)

  def _others(self):
    mlir.when(mlir.equal(self.warp, self.plan.tile.warps), self._produce)
    # The same barriers as those who multiply.
    ptx.block_barrier()
    if self.plan.tile.cluster > 1:
      ptx.cluster_barrier()
      ptx.cluster_barrier()

  def _runs(self):
    """Runs of slots alike: first step, slots, steps of each, refined words."""
    group = self.tile.group
    out = []
    for begin, end, kind in self.plan.parts:
      whole, rest = divmod(end - begin, group)
      out.append((begin, whole, group, kind))
      out.append((end - rest, int(rest > 0), rest, kind))
    return [run for run in out if run[1]]

  def _produce(self):
    """Lane w copies the weights of warp w, the first lane also x."""
    plan, tile = self.plan, self.tile
    self.x_source = mlir.offset(
      self.at["x"], mlir.mul(self.split, plan.steps), plan.x_step_bytes
    )
    self.find_weights(mlir.minimum(self.lane, tile.row_warps - 1))
    self.mine = mlir.less(self.lane, tile.row_warps)
    carried = [mlir.const(0), mlir.const(1)]
    for begin, slots, steps, kind in self._runs():

      def body(i, c, begin=begin, steps=steps, kind=kind):
        step = mlir.add(mlir.mul(i, steps), begin)
        self._fill(step, steps, kind, *c)
        return self.next_slot(*c)

      carried = mlir.loop(slots, carried, body)

  def _fill(self, step, steps, kind, slot, parity):
    """Copies some steps into a slot, once it is empty."""
    plan, tile = self.plan, self.tile
    full = mlir.add(self.full, mlir.shl(slot, 3))
    target = mlir.add(self.ring, mlir.mul(slot, plan.slot_bytes))
    units, offsets = steps * UNIT_BYTES, steps * 64 * kind
    x_bytes = steps * plan.x_step_bytes
    ptx.barrier_wait(mlir.add(self.empty, mlir.shl(slot, 3)), parity)

    def x():
      size = x_bytes + tile.row_warps * (units + offsets)
      ptx.barrier_expect(full, mlir.const(size))
      source = mlir.offset(self.x_source, step, plan.x_step_bytes)
      ptx.copy_bulk(target, source, mlir.const(x_bytes), full)

    mlir.when(self.leader, x)
    ptx.warp_barrier()

    def weights():
      place = mlir.add(target, self.units_at)
      place = mlir.add(place, mlir.mul(self.lane, units))
      source = mlir.offset(self.unit_source, step, UNIT_BYTES)
      ptx.copy_bulk(place, source, mlir.const(units), full)
      if kind:
        # In units of one refined word: those of the steps before.
        before = mlir.add(step, mlir.minimum(step, plan.doubles))
        place = mlir.add(target, self.offsets_at)
        place = mlir.add(place, mlir.mul(self.lane, offsets))
        source = mlir.offset(self.offset_source, before, 64)
        ptx.copy_bulk(place, source, mlir.const(offsets), full)

    mlir.when(self.mine, weights)

  def _main_loop(self):
    carried = [mlir.const(0), mlir.const(0)]
    carried += [mlir.zero_f32() for _ in range(4 * self.plan.row_fragments)]
    for number, (_, slots, steps, kind) in enumerate(self._runs()):

      def body(i, c, steps=steps, kind=kind, first=number == 0):
        return self._multiply_slot(i, c, steps, kind, first)

      carried = mlir.loop(slots, carried, body)
      # Products that run into another loop would be serialized by ptxas.
      carried = [*carried[:2], *ptx.wgmma_finish(carried[2:])]
    return carried[2:]

  def _multiply_slot(self, i, carried, steps, kind, first):
    plan = self.plan
    slot, parity, *sums = carried
    source = mlir.add(self.ring, mlir.mul(slot, plan.slot_bytes))
    ptx.barrier_wait(mlir.add(self.full, mlir.shl(slot, 3)), parity)
    descriptor = ptx.swizzled_descriptor(source)
    for step in range(steps):
      loaded = self._load_step(source, step, steps, kind)
      words = ptx.wgmma_fence(self._decode_unit(*loaded, kind))
      for kk in range(4):
        shift = 2 * kk + step * (plan.x_step_bytes // 16)
        b = mlir.add_wide(descriptor, shift)
        sums = ptx.wgmma_64xn(sums, words[4 * kk : 4 * kk + 4], b)
      ptx.wgmma_commit()
      ptx.wgmma_wait(1)
      if step == 0:
        # Products of the slot before are over.
        done = self.leader
        if first:
          done = mlir.both(done, mlir.less(mlir.const(0), i))
        empty = mlir.add(self.empty, mlir.shl(self.slot_before(slot), 3))
        mlir.when(done, partial(ptx.barrier_arrive, empty))
    return [*self.next_slot(slot, parity), *sums]

  def _load_step(self, source, step, steps, kind):
    """This lane's words, scales and offsets of one step of a slot."""
    return self.load_unit(
      mlir.add(source, mlir.mul(self.warp, steps * UNIT_BYTES)),
      self.units_at + step * UNIT_BYTES,
      mlir.add(source, mlir.mul(self.warp, steps * 64 * kind)),
      self.offsets_at + step * 64 * kind,
      kind,
    )

  def _decode_unit(self, words, scales, offsets, kind):
    out = []
    for kk in range(4):
      pairs = decode.decode_pairs(words[kk])
      if kk < kind:
        pairs = decode.refine_pairs(pairs, offsets, kk, self.plan.exponent)
      out += decode.scale_pairs(pairs, scales)
    return out
