"""Products by mma.sync, with weights and x in rings of shared memory.

Warps of a block split its rows and its columns. Those side by side along N
share a ring and meet once a step; others never wait for each other in the loop.
Lane 0 of a warp starts the copy of the warp's weights (one or two bulk copies a
step), every lane copies some chunks of x, and all of it arrives at one barrier.
"""

from functools import partial

from autoematic_jax.pallas_kernels.extended_gemm.fragments import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import UNIT_BYTES
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.body import Body
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm.sm90.sums import write_sums
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx


class StreamBody(Body):
  """Emits the kernel; see the module."""

  def emit(self) -> None:
    """Everything, in order."""
    plan, tile = self.plan, self.plan.tile
    ring = mlir.mul(self.column_warp, tile.depth)
    self.barriers = mlir.add(self.shared, mlir.add(mlir.mul(ring, 8), 16))
    self.ring = mlir.add(self.ring, mlir.mul(ring, plan.slot_bytes))
    self.find_weights(self.row_warp)
    self._start_ring()
    self.touch_row_scale()
    if plan.mode == "mixed":
      self._masks()
    sums = self._main_loop()
    ptx.block_barrier()
    write_sums(self, sums)

  def _start_ring(self):
    tile, depth = self.plan.tile, self.plan.tile.depth
    self.in_group = mlir.add(mlir.shl(self.row_warp, 5), self.lane)
    # A leader and every lane of each warp arrive.
    arrivals = 33 * tile.row_warps

    def init():
      for slot in range(depth):
        ptx.barrier_init(mlir.add(self.barriers, 8 * slot), arrivals)
      ptx.barrier_init_fence()

    first = mlir.both(self.active, mlir.equal(self.in_group, 0))
    mlir.when(first, init)
    if tile.row_warps == 1:
      ptx.warp_barrier()
    else:
      ptx.block_barrier()
    self._find_chunks()
    for step in range(min(depth - 1, self.plan.steps)):
      self._issue(mlir.const(step), mlir.const(step))

  def _meet(self):
    """Waits for those who share the ring."""
    tile = self.plan.tile
    if tile.row_warps == 1:
      ptx.warp_barrier()
    else:
      ptx.group_barrier(mlir.add(self.column_warp, 1), 32 * tile.row_warps)

  def _find_chunks(self):
    """Where each of this lane's 16-byte chunks of x comes from and goes."""
    plan, tile = self.plan, self.plan.tile
    part = mlir.add(mlir.mul(self.split, tile.column_warps), self.column_warp)
    first_chunk = mlir.mul(part, plan.steps * 8)
    threads = 32 * tile.row_warps
    self.chunks = []
    for turn in range(-(-8 * plan.m // threads)):
      index = mlir.add(self.in_group, turn * threads)
      row, chunk = mlir.shr(index, 3), mlir.and_(index, 7)
      wanted = None
      if 8 * plan.m % threads:
        wanted = mlir.less(index, 8 * plan.m)
      swizzled = mlir.xor(chunk, mlir.and_(row, 7))
      to = mlir.add(mlir.shl(row, 7), mlir.shl(swizzled, 4))
      chunk = mlir.add(first_chunk, chunk)
      source = mlir.offset(self.at["x"], mlir.mul(row, 2 * plan.k))
      source = mlir.offset(source, chunk, 16)
      self.chunks.append((wanted, source, to, chunk))

  def _issue(self, step, slot):
    """Starts the copies of one step, if there is such a step."""
    target = mlir.add(self.ring, mlir.mul(slot, self.plan.slot_bytes))
    barrier = mlir.add(self.barriers, mlir.shl(slot, 3))
    weights = mlir.add(target, mlir.mul(self.row_warp, self.plan.warp_bytes))
    x = mlir.add(target, self.plan.tile.row_warps * self.plan.warp_bytes)

    def start():
      mlir.when(
        self.leader, lambda: self._issue_weights(step, weights, barrier)
      )
      self._issue_x(step, x, barrier)

    mlir.when(mlir.both(self.active, mlir.less(step, self.plan.steps)), start)

  def _issue_weights(self, step, target, barrier):
    plan, tiles = self.plan, self.plan.tile.tiles
    size = mlir.const(tiles * UNIT_BYTES)
    source = mlir.offset(self.unit_source, step, UNIT_BYTES * tiles)
    if not plan.refined:
      ptx.barrier_expect(barrier, size)
      ptx.copy_bulk(target, source, size, barrier)
      return
    some = mlir.less(step, plan.doubles + plan.singles)
    more = mlir.select(
      mlir.less(step, plan.doubles),
      mlir.const(128 * tiles),
      mlir.const(64 * tiles),
    )
    more = mlir.select(some, more, mlir.const(0))
    ptx.barrier_expect(barrier, mlir.add(size, more))
    ptx.copy_bulk(target, source, size, barrier)
    # In units of one refined word: those of the steps before.
    before = mlir.add(step, mlir.minimum(step, plan.doubles))
    mlir.when(
      some,
      lambda: ptx.copy_bulk(
        mlir.add(target, tiles * UNIT_BYTES),
        mlir.offset(self.offset_source, before, 64 * tiles),
        more,
        barrier,
      ),
    )

  def _issue_x(self, step, x, barrier):
    for wanted, source, to, chunk in self.chunks:
      copy = partial(self._copy_chunk, step, mlir.add(x, to), source, chunk)
      if wanted is None:
        copy()
      else:
        mlir.when(wanted, copy)
    ptx.barrier_arrive_copies(barrier)

  def _copy_chunk(self, step, target, source, chunk):
    plan = self.plan
    address = mlir.offset(source, step, 2 * COLUMNS)
    if plan.steps * plan.tile.slices * COLUMNS == plan.k:
      ptx.copy_async16(target, address)
      return
    # Columns past K are zero.
    inside = mlir.less(mlir.add(chunk, mlir.shl(step, 3)), plan.k // 8)
    address = mlir.select(inside, address, self.at["x"])
    size = mlir.select(inside, mlir.const(16), mlir.const(0))
    ptx.copy_async16_sized(target, address, size)

  def _masks(self):
    """All ones for rows of x at 6 bits, one row a lane and fragment."""
    self.six = []
    for fragment in range(self.plan.row_fragments):
      row = mlir.add(self.quad, ROW_TILE * fragment)
      row = mlir.minimum(row, self.plan.m - 1)
      level = ptx.load_global(mlir.offset(self.at["levels"], row, 4))
      low = mlir.less(level, 6)
      self.six.append(mlir.select(low, mlir.const(0), mlir.const(0xFFFFFFFF)))

  def _main_loop(self):
    plan = self.plan
    count = 4 * plan.row_fragments * plan.tile.tiles
    self.x_lane = self._first_chunk()
    carried = [mlir.const(0), mlir.const(0)]
    carried += [mlir.zero_f32() for _ in range(count)]
    for begin, end, kind in plan.parts:
      steps = mlir.select(self.active, mlir.const(end - begin), mlir.const(0))

      def body(i, c, begin=begin, kind=kind):
        return self._step(mlir.add(i, begin), c, kind)

      carried = mlir.loop(steps, carried, body)
    return carried[2:]

  def _first_chunk(self):
    """Within a slot: the first of this lane's two chunks of x."""
    chunk = mlir.xor(mlir.shl(mlir.and_(self.lane, 3), 1), self.quad)
    x = mlir.add(mlir.shl(self.quad, 7), mlir.shl(chunk, 4))
    return mlir.add(x, self.plan.tile.row_warps * self.plan.warp_bytes)

  def _step(self, step, carried, kind):
    plan, tile = self.plan, self.plan.tile
    slot, parity, *sums = carried
    # Every lane is done with the slot before this one: fill it again.
    self._meet()
    self._issue(mlir.add(step, tile.depth - 1), self.slot_before(slot))
    ptx.barrier_wait(mlir.add(self.barriers, mlir.shl(slot, 3)), parity)
    source = mlir.add(self.ring, mlir.mul(slot, plan.slot_bytes))
    x = self._load_x(source)
    for t in range(tile.tiles):
      self._multiply_unit(source, t, kind, x, sums)
    return [*self.next_slot(slot, parity), *sums]

  def _load_x(self, source):
    """For each fragment of rows, this lane's words."""
    here = mlir.add(source, self.x_lane)
    there = mlir.add(source, mlir.xor(self.x_lane, mlir.const(16)))
    return [
      [*ptx.load_shared4(here, at), *ptx.load_shared4(there, at)]
      for at in range(0, 1024 * self.plan.row_fragments, 1024)
    ]

  def _multiply_unit(self, source, t, kind, x, sums):
    """16 rows by 64 columns: four mma for every fragment of x."""
    plan = self.plan
    mixed = plan.mode == "mixed"
    own = mlir.add(source, mlir.mul(self.row_warp, plan.warp_bytes))
    offsets_at = plan.tile.tiles * UNIT_BYTES + t * 64 * kind
    words, scales, offsets = self.load_unit(
      own, t * UNIT_BYTES, own, offsets_at, kind
    )
    for kk in range(4):
      pairs = decode.decode_pairs(words[kk])
      # Each variant of the word and whether rows at 6 bits take it.
      variants = [(decode.scale_pairs(pairs, scales), False)]
      if kk < kind:
        refined = decode.refine_pairs(pairs, offsets, kk, plan.exponent)
        refined = decode.scale_pairs(refined, scales)
        variants = [*(variants if mixed else []), (refined, True)]
      for fragment in range(plan.row_fragments):
        b = x[fragment][2 * kk : 2 * kk + 2]
        at = 4 * (t * plan.row_fragments + fragment)
        for a, six in variants:
          rows = b
          if len(variants) > 1:
            # Rows at the other level become zeros, which add nothing.
            rows = self._rows_at(b, fragment, six)
          sums[at : at + 4] = ptx.mma_16x8x16(sums[at : at + 4], a, rows)

  def _rows_at(self, b, fragment, six):
    mask = self.six[fragment]
    if not six:
      mask = mlir.sub(mlir.const(0xFFFFFFFF), mask)
    return [mlir.and_(word, mask) for word in b]
