"""The kernel of `decode.py`.

A lane scores one key's 64 elements at a time, so that 1, 2 or 4 lanes share a
key. Weights of all keys of the chunk then lie in shared memory, and a lane adds
four elements of every few values.

A byte's bits, moved to where float32 has its exponent, are its value times
2^-126; factors of 2^100 and 2^26 beside it bring that back without leaving the
range of float32.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from autoematic_jax.pallas_kernels.attention.decode import THREADS
from autoematic_jax.pallas_kernels.attention.decode import chunk_size
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.launch import launch
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.operands import Operands

_WARPS = THREADS // 32
_FAR = -1e30
"""Score of a key that is not seen; an Inf would give NaN where all are."""


def partial_sums(
  queries: Float[Array, "N G W"],
  codes: UInt8[Array, "L B C S W"],
  scales: UInt8[Array, "L B C S K"],
  positions: Int[Array, "B"],
  layer: Int[Array, "1"],
) -> tuple[
  Float[Array, "N P G W"], Float[Array, "N P G"], Float[Array, "N P G"]
]:
  """Each chunk's weighted values, largest score and sum of weights.

  Args:
    queries: Scaled, of each request and key head; zeros past the head.
    codes: Keys' heads, then values'.
    scales: Of each 16 codes.
    positions: Keys past them are not seen.
    layer: Which layer.
  """
  plan = Plan(
    batch=codes.shape[1],
    kv_heads=codes.shape[2] // 2,
    group=queries.shape[1],
    capacity=codes.shape[3],
    width=codes.shape[4],
  )
  operands = {
    "queries": queries.astype(jnp.float32),
    "codes": codes,
    "scales": scales,
    "positions": positions,
    "layer": layer,
  }
  lead = (plan.batch * plan.kv_heads, plan.chunks, plan.group)
  return launch(
    lambda *refs: Body(plan, *refs).emit(),
    operands,
    {
      "sums": jax.ShapeDtypeStruct((*lead, plan.width), jnp.float32),
      "largest": jax.ShapeDtypeStruct(lead, jnp.float32),
      "norm": jax.ShapeDtypeStruct(lead, jnp.float32),
    },
    name="decode_attention",
    blocks=plan.blocks,
    threads=THREADS,
    shared_words=plan.shared_words,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static numbers.

  Attributes:
    batch: Requests.
    kv_heads: Heads of keys.
    group: Query heads of each.
    capacity: Keys of a request.
    width: Of a packed head.
  """

  batch: int
  kv_heads: int
  group: int
  capacity: int
  width: int

  @property
  def chunk(self) -> int:
    """Keys of a block."""
    return chunk_size(self.capacity, self.width)

  @property
  def chunks(self) -> int:
    return -(-self.capacity // self.chunk)

  @property
  def blocks(self) -> int:
    return self.batch * self.kv_heads * self.chunks

  @property
  def lanes(self) -> int:
    """Lanes that share a key."""
    return self.width // 64

  @property
  def turn(self) -> int:
    """Keys that are scored together."""
    return THREADS // self.lanes

  @property
  def parts(self) -> int:
    """Values that are added side by side."""
    return THREADS // (self.width // 4)

  @property
  def weights_at(self) -> int:
    """Word of shared memory at which scores begin, after the queries."""
    return self.group * self.width

  @property
  def reduce_at(self) -> int:
    """Word at which what warps tell each other begins."""
    return self.weights_at + self.group * self.chunk

  @property
  def shared_words(self) -> int:
    more = 2 * _WARPS * self.group
    # Partial sums lie where queries and scores were.
    return max(self.reduce_at + more, self.parts * self.group * self.width)


class Body(Operands):
  """Emits the kernel while it is traced."""

  def __init__(self, plan: Plan, names: Sequence[str], *refs: Value):
    super().__init__(names, *refs)
    self.plan = plan
    self.warp = mlir.shr(self.thread, 5)
    chunk = mlir.rem(self.block, plan.chunks)
    self.pair = mlir.div(self.block, plan.chunks)
    request = mlir.div(self.pair, plan.kv_heads)
    head = mlir.rem(self.pair, plan.kv_heads)
    layer = ptx.load_global(self.at["layer"])
    position = mlir.offset(self.at["positions"], request, 4)
    self.position = ptx.load_global(position)
    self.first = mlir.mul(chunk, plan.chunk)
    row = mlir.add(mlir.mul(layer, plan.batch), request)
    row = mlir.add(mlir.mul(row, 2 * plan.kv_heads), head)
    self.key_row = mlir.mul(row, plan.capacity)
    values = mlir.add(row, plan.kv_heads)
    self.value_row = mlir.mul(values, plan.capacity)

  def emit(self) -> None:
    """Everything, in order."""
    past = mlir.less(self.position, self.first)
    mlir.when(past, self._nothing)
    mlir.when(mlir.less(self.first, mlir.add(self.position, 1)), self._attend)

  def _nothing(self):
    """A chunk past the request's end weighs nothing."""
    plan = self.plan
    zero = mlir.zero_f32()
    for first in range(0, plan.group * plan.width, THREADS):
      index = mlir.add(self.thread, first)
      store = partial(self._store, "sums", plan.width * plan.group, index, zero)
      mlir.when(mlir.less(index, plan.group * plan.width), store)
    far = mlir.const_f32(_FAR)
    for name, value in (("largest", far), ("norm", zero)):
      store = partial(self._store, name, plan.group, self.thread, value)
      mlir.when(mlir.less(self.thread, plan.group), store)

  def _store(self, name, block_size, index, value):
    line = mlir.offset(self.at[name], self.block, 4 * block_size)
    ptx.store_global_f32(mlir.offset(line, index, 4), value)

  def _attend(self):
    plan = self.plan
    self._load_queries()
    ptx.block_barrier()
    largest = [mlir.const_f32(_FAR) for _ in range(plan.group)]
    for turn in range(plan.chunk // plan.turn):
      largest = self._score(turn, largest)
    largest = self._over_block(largest, mlir.max_f32, 0)
    norm = self._weigh(largest)
    norm = self._over_block(norm, mlir.add_f32, _WARPS * plan.group)
    sums = self._add_values()
    # Sums take the place of the weights.
    ptx.block_barrier()
    self._write(sums, largest, norm)

  def _load_queries(self):
    plan = self.plan
    count = plan.group * plan.width
    line = mlir.offset(self.at["queries"], self.pair, 4 * count)
    for first in range(0, count, THREADS):
      index = mlir.add(self.thread, first)
      exists = mlir.less(index, count)
      index = mlir.minimum(index, count - 1)
      query = ptx.load_global_f32(mlir.offset(line, index, 4))
      query = mlir.mul_f32(query, mlir.const_f32(2.0**100))
      target = mlir.add(self.shared, mlir.shl(index, 2))
      mlir.when(exists, partial(ptx.store_shared_f32, target, query))

  def _key_of(self, turn, index):
    """The key's row in the cache, kept inside, and whether it is seen."""
    key = mlir.add(self.first, mlir.add(index, turn * self.plan.turn))
    seen = mlir.less(key, mlir.add(self.position, 1))
    return mlir.minimum(key, self.plan.capacity - 1), seen

  def _score(self, turn, largest):
    """Scores a key a lane, or a part of one, for every query head."""
    plan = self.plan
    index = mlir.div(self.thread, plan.lanes)
    part = mlir.rem(self.thread, plan.lanes)
    key, seen = self._key_of(turn, index)
    row = mlir.add(self.key_row, key)
    codes = mlir.offset(self.at["codes"], row, plan.width)
    codes = mlir.offset(codes, part, 64)
    scales = mlir.offset(self.at["scales"], row, plan.width // 16)
    scales = ptx.load_global(mlir.offset(scales, part, 4))
    words = []
    for n in range(4):
      words += ptx.load_global4(mlir.add_wide(codes, 16 * n))
    query = mlir.add(self.shared, mlir.mul(part, 256))
    totals = [mlir.zero_f32() for _ in range(plan.group)]
    for n in range(4):
      scale = _scale(_byte(scales, n))
      elements = [x for word in words[4 * n : 4 * n + 4] for x in _bytes(word)]
      for g in range(plan.group):
        dot = mlir.zero_f32()
        for m in range(4):
          at = 4 * (g * plan.width + 16 * n + 4 * m)
          for q, x in zip(
            ptx.load_shared4_f32(query, at),
            elements[4 * m : 4 * m + 4],
            strict=True,
          ):
            dot = ptx.fma(q, x, dot)
        totals[g] = ptx.fma(dot, scale, totals[g])
    distance = 1
    while distance < plan.lanes:
      totals = [
        mlir.add_f32(total, ptx.from_lane(total, distance)) for total in totals
      ]
      distance *= 2
    far = mlir.const_f32(_FAR)
    totals = [mlir.select(seen, total, far) for total in totals]
    mine = mlir.equal(part, 0)
    for g, total in enumerate(totals):
      target = self._weight(g, mlir.add(index, turn * plan.turn))
      mlir.when(mine, partial(ptx.store_shared_f32, target, total))
    return [mlir.max_f32(a, b) for a, b in zip(largest, totals, strict=True)]

  def _weight(self, g, index):
    """Shared address of a key's score, then weight, for a query head."""
    at = 4 * (self.plan.weights_at + g * self.plan.chunk)
    return mlir.add(mlir.add(self.shared, at), mlir.shl(index, 2))

  def _weigh(self, largest):
    """Turns scores into weights; returns this thread's share of their sum."""
    plan = self.plan
    norm = []
    for g in range(plan.group):
      total = mlir.zero_f32()
      for first in range(0, plan.chunk, THREADS):
        index = mlir.add(self.thread, first)
        exists = mlir.less(index, plan.chunk)
        target = self._weight(g, mlir.minimum(index, plan.chunk - 1))
        score = ptx.load_shared_f32(target)
        below = mlir.sub_f32(score, largest[g])
        weight = ptx.exp2(mlir.mul_f32(below, mlir.const_f32(_LOG2_E)))
        weight = mlir.select(exists, weight, mlir.zero_f32())
        mlir.when(exists, partial(ptx.store_shared_f32, target, weight))
        total = mlir.add_f32(total, weight)
      norm.append(total)
    return norm

  def _add_values(self):
    """Four elements of every few values, for every query head."""
    plan = self.plan
    lanes = plan.width // 4
    element = mlir.rem(self.thread, lanes)
    part = mlir.div(self.thread, lanes)
    group = mlir.shr(element, 2)

    def add(i, sums):
      index = mlir.add(mlir.mul(i, plan.parts), part)
      key = mlir.add(self.first, index)
      row = mlir.add(self.value_row, mlir.minimum(key, plan.capacity - 1))
      codes = mlir.offset(self.at["codes"], row, plan.width)
      word = ptx.load_global(mlir.offset(codes, element, 4))
      scales = mlir.offset(self.at["scales"], row, plan.width // 16)
      scale = _scale(ptx.load_global8(mlir.offset(scales, group)))
      large = mlir.const_f32(2.0**100)
      values = [mlir.mul_f32(x, large) for x in _bytes(word)]
      out = []
      for g in range(plan.group):
        weight = ptx.load_shared_f32(self._weight(g, index))
        weight = mlir.mul_f32(weight, scale)
        out += [
          ptx.fma(value, weight, old)
          for old, value in zip(sums[4 * g : 4 * g + 4], values, strict=True)
        ]
      return out

    zeros = [mlir.zero_f32() for _ in range(4 * plan.group)]
    return mlir.loop(plan.chunk // plan.parts, zeros, add)

  def _write(self, sums, largest, norm):
    plan = self.plan
    size = plan.group * plan.width
    lanes = plan.width // 4
    element = mlir.rem(self.thread, lanes)
    part = mlir.div(self.thread, lanes)
    base = mlir.add(self.shared, mlir.mul(part, 4 * size))
    base = mlir.add(base, mlir.shl(element, 4))
    for g in range(plan.group):
      ptx.store_shared4_f32(base, sums[4 * g : 4 * g + 4], 4 * g * plan.width)
    ptx.block_barrier()
    for first in range(0, size, THREADS):
      index = mlir.add(self.thread, first)
      exists = mlir.less(index, size)
      place = mlir.add(self.shared, mlir.shl(mlir.minimum(index, size - 1), 2))
      total = ptx.load_shared_f32(place)
      for n in range(1, plan.parts):
        total = mlir.add_f32(total, ptx.load_shared_f32(place, 4 * n * size))
      mlir.when(exists, partial(self._store, "sums", size, index, total))
    for g in range(plan.group):
      mine = mlir.equal(self.thread, g)
      for name, values in (("largest", largest), ("norm", norm)):
        index = mlir.const(g)
        store = partial(self._store, name, plan.group, index, values[g])
        mlir.when(mine, store)

  def _over_block(self, values, combine, at):
    """Combines every thread's values, one for each query head."""
    for distance in (16, 8, 4, 2, 1):
      values = [combine(x, ptx.from_lane(x, distance)) for x in values]
    base = mlir.add(self.shared, 4 * (self.plan.reduce_at + at))
    first = mlir.equal(self.lane, 0)
    for g, value in enumerate(values):
      mine = mlir.add(base, mlir.shl(self.warp, 2))
      mine = mlir.add(mine, 4 * _WARPS * g)
      mlir.when(first, partial(ptx.store_shared_f32, mine, value))
    ptx.block_barrier()
    out = []
    for g in range(len(values)):
      parts = ptx.load_shared4_f32(base, 4 * _WARPS * g)
      total = parts[0]
      for part in parts[1:]:
        total = combine(total, part)
      out.append(total)
    return out


_LOG2_E = math.log2(math.e)


def _byte(word, n):
  return mlir.and_(mlir.shr(word, 8 * n), 255)


def _bytes(word):
  """Four E2M5 bytes as float32, times 2^-126."""
  out = []
  for n in range(4):
    sign = mlir.and_(mlir.shl(word, 24 - 8 * n), 0x80000000)
    shift = 18 - 8 * n
    bits = mlir.shl(word, shift) if shift >= 0 else mlir.shr(word, -shift)
    bits = mlir.or_(mlir.and_(bits, 0x01FC0000), sign)
    out.append(mlir.as_f32(bits))
  return out


def _scale(byte):
  """An E4M3 byte as float32, times 2^26."""
  value = mlir.as_f32(mlir.shl(mlir.and_(byte, 127), 20))
  return mlir.mul_f32(
    mlir.mul_f32(value, mlir.const_f32(2.0**120)), mlir.const_f32(2.0**26)
  )
