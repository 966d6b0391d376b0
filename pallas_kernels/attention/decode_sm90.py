"""The kernel of `decode.py`.

Both products are `mma.sync` with what is stored as their left operand: 16 keys
by 16 elements against up to 8 query heads, then 16 elements by 16 keys against
the heads' weights. A byte's bits, moved, are a float16 of its value times
2^-14, and times its scale that is exact. Queries and weights are split in two
float16 numbers each, which together keep 22 bits.

The four warps of a block take 16 or 32 keys in turn, each with a running
maximum of its own, and meet at the end.
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
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode as packed
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.launch import launch
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.operands import Operands

_WARPS = THREADS // 32
_KEYS = 16
"""Keys of one product."""

_QUERIES = 8
_FAR = -1e30
"""Score of a key that is not seen; an Inf would give NaN where all are."""

_LOG2_E = math.log2(math.e)


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

  Returns:
    Scores are powers of 2.
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
    return chunk_size(self.capacity, self.batch * self.kv_heads)

  @property
  def chunks(self) -> int:
    return -(-self.capacity // self.chunk)

  @property
  def blocks(self) -> int:
    return self.batch * self.kv_heads * self.chunks

  @property
  def tiles(self) -> int:
    """Products over keys that a warp has loaded at a time."""
    return 2 if self.width <= 128 else 1

  @property
  def quads(self) -> int:
    """Four groups of 16 elements: what four lanes read of a key."""
    return self.width // 64

  @property
  def lane_bytes(self) -> int:
    """What a lane reads of a value."""
    return self.width // 8

  @property
  def sums_at(self) -> int:
    """Word of shared memory at which sums begin, after maxima and norms."""
    return 2 * _WARPS * _QUERIES

  @property
  def shared_words(self) -> int:
    return self.sums_at + _WARPS * _QUERIES * self.width


class Body(Operands):
  """Emits the kernel while it is traced."""

  def __init__(self, plan: Plan, names: Sequence[str], *refs: Value):
    super().__init__(names, *refs)
    self.plan = plan
    self.warp = mlir.shr(self.thread, 5)
    self.row = mlir.shr(self.lane, 2)
    self.column = mlir.and_(self.lane, 3)
    chunk = mlir.rem(self.block, plan.chunks)
    self.pair = mlir.div(self.block, plan.chunks)
    request = mlir.div(self.pair, plan.kv_heads)
    head = mlir.rem(self.pair, plan.kv_heads)
    layer = ptx.load_global(self.at["layer"])
    position = mlir.offset(self.at["positions"], request, 4)
    self.end = mlir.add(ptx.load_global(position), 1)
    self.first = mlir.mul(chunk, plan.chunk)
    row = mlir.add(mlir.mul(layer, plan.batch), request)
    row = mlir.add(mlir.mul(row, 2 * plan.kv_heads), head)
    self.key_row = mlir.mul(row, plan.capacity)
    values = mlir.add(row, plan.kv_heads)
    self.value_row = mlir.mul(values, plan.capacity)

  def emit(self) -> None:
    """Everything, in order."""
    plan = self.plan
    seen = mlir.less(self.first, self.end)
    # Nothing, where the chunk lies past the request's end.
    count = mlir.select(seen, mlir.sub(self.end, self.first), mlir.const(0))
    count = mlir.minimum(count, plan.chunk)
    step = _WARPS * _KEYS * plan.tiles
    turns = mlir.div(mlir.add(count, step - 1), step)
    self.queries = self._load_queries()
    carried = [mlir.const_f32(_FAR) for _ in range(2)]
    carried += [mlir.zero_f32() for _ in range(2 + 4 * (plan.width // 16))]
    carried = mlir.loop(turns, carried, self._turn)
    self._meet(carried[:2], carried[2:4], carried[4:])

  def _load_queries(self):
    """Upper and lower parts of this lane's four elements of every product."""
    plan = self.plan
    exists = mlir.less(self.row, plan.group)
    head = mlir.minimum(self.row, plan.group - 1)
    line = mlir.add(mlir.mul(self.pair, plan.group), head)
    line = mlir.offset(self.at["queries"], line, 4 * plan.width)
    out = []
    for quad in range(plan.quads):
      # In fours: a group has four of them.
      first = mlir.add(mlir.shl(self.column, 2), 16 * quad)
      here = mlir.offset(line, first, 16)
      for word in range(4):
        values = ptx.load_global4_f32(mlir.add_wide(here, 16 * word))
        values = [mlir.select(exists, x, mlir.zero_f32()) for x in values]
        factor = mlir.const_f32(_LOG2_E)
        values = [mlir.mul_f32(x, factor) for x in values]
        out.append(tuple(zip(*map(_split, _pairs(values)), strict=True)))
    return out

  def _turn(self, index, carried):
    """Some keys and their values."""
    plan = self.plan
    largest, norm, sums = carried[:2], carried[2:4], carried[4:]
    number = mlir.add(mlir.mul(index, _WARPS), self.warp)
    first = mlir.add(self.first, mlir.mul(number, _KEYS * plan.tiles))
    starts = [mlir.add(first, _KEYS * tile) for tile in range(plan.tiles)]
    keys = [self._load_keys(start) for start in starts]
    values = [self._load_values(start) for start in starts]
    scores = [
      self._scores(start, *some)
      for start, some in zip(starts, keys, strict=True)
    ]
    before = largest
    largest = self._maxima(before, scores)
    shrunk = [
      ptx.exp2(mlir.sub_f32(a, b)) for a, b in zip(before, largest, strict=True)
    ]
    norm = [mlir.mul_f32(a, b) for a, b in zip(norm, shrunk, strict=True)]
    sums = [mlir.mul_f32(x, shrunk[n % 2]) for n, x in enumerate(sums)]
    for some, (words, bytes_) in zip(scores, values, strict=True):
      weights = [
        ptx.exp2(mlir.sub_f32(x, largest[n % 2])) for n, x in enumerate(some)
      ]
      norm = [
        mlir.add_f32(old, mlir.add_f32(weights[n], weights[2 + n]))
        for n, old in enumerate(norm)
      ]
      sums = self._add_values(sums, weights, words, bytes_)
    return [*largest, *norm, *sums]

  def _row_of(self, base, key):
    return mlir.add(base, mlir.minimum(key, self.plan.capacity - 1))

  def _load_keys(self, start):
    """Of each quad, this lane's words of two keys, and their scales' bytes."""
    plan = self.plan
    out = [([], []) for _ in range(plan.quads)]
    for below in (0, 8):
      row = self._row_of(
        self.key_row, mlir.add(mlir.add(start, self.row), below)
      )
      codes = mlir.offset(self.at["codes"], row, plan.width)
      codes = mlir.offset(codes, self.column, 16)
      scales = mlir.offset(self.at["scales"], row, plan.width // 16)
      scales = mlir.offset(scales, self.column)
      for quad, (words, bytes_) in enumerate(out):
        words.append(ptx.load_global4(mlir.add_wide(codes, 64 * quad)))
        bytes_.append(ptx.load_global8(mlir.add_wide(scales, 4 * quad)))
    return out

  def _scores(self, start, *quads):
    """Of keys `row` and `row + 8`, each by query heads 2 column + (0, 1)."""
    sums = [mlir.zero_f32() for _ in range(4)]
    for quad, (words, bytes_) in enumerate(quads):
      joined = mlir.or_(bytes_[0], mlir.shl(bytes_[1], 8))
      scales = packed.decode_scales(joined)
      for word in range(4):
        halves = [
          ptx.mul_half2(
            _decoded(ptx.permute(words[key][word], 0, selector)), scales[key]
          )
          for selector in (0x1404, 0x3424)
          for key in range(2)
        ]
        for part in self.queries[4 * quad + word]:
          sums = ptx.mma_16x8x16(sums, halves, part)
    out = []
    for n, x in enumerate(sums):
      key = mlir.add(mlir.add(start, self.row), 8 * (n // 2))
      score = mlir.mul_f32(x, mlir.const_f32(packed.EPILOGUE))
      seen = mlir.less(key, self.end)
      out.append(mlir.select(seen, score, mlir.const_f32(_FAR)))
    return out

  def _maxima(self, before, scores):
    """Of both query heads, over the warp."""
    out = []
    for n, value in enumerate(before):
      for some in scores:
        value = mlir.max_f32(value, mlir.max_f32(some[n], some[2 + n]))
      for distance in (4, 8, 16):
        value = mlir.max_f32(value, ptx.from_lane(value, distance))
      out.append(value)
    return out

  def _load_values(self, start):
    """This lane's words of four keys, and their scales' bytes."""
    plan = self.plan
    words, bytes_ = [], []
    for below in (0, 1, 8, 9):
      key = mlir.add(start, mlir.add(mlir.shl(self.column, 1), below))
      row = self._row_of(self.value_row, key)
      codes = mlir.offset(self.at["codes"], row, plan.width)
      codes = mlir.offset(codes, self.row, plan.lane_bytes)
      words.append(_load_words(codes, plan.lane_bytes // 4))
      scales = mlir.offset(self.at["scales"], row, plan.width // 16)
      group = mlir.shr(mlir.mul(self.row, plan.lane_bytes), 4)
      scales = mlir.offset(scales, group)
      bytes_.append(
        [
          ptx.load_global8(mlir.add_wide(scales, n))
          for n in range(-(-plan.lane_bytes // 16))
        ]
      )
    return words, bytes_

  def _add_values(self, sums, weights, words, bytes_):
    """Two elements by four keys of this lane in every product."""
    # To where the products want them: query head `row`, this lane's keys.
    parts = [
      [ptx.transpose_8x8(half) for half in halves]
      for halves in zip(*map(_split, _pairs(weights)), strict=True)
    ]
    scales = [
      [
        packed.decode_scale_pair(mlir.or_(first, mlir.shl(second, 8)))
        for first, second in zip(bytes_[n], bytes_[n + 1], strict=True)
      ]
      for n in (0, 2)
    ]
    out = []
    for product in range(self.plan.width // 16):
      halves = []
      for n in (0, 1):
        for element in (2 * product, 2 * product + 1):
          word, byte = element // 4, element % 4
          pair = ptx.permute(
            words[2 * n][word],
            words[2 * n + 1][word],
            byte * 0x0111 + ((4 + byte) << 12),
          )
          scale = scales[n][element // 16]
          halves.append(ptx.mul_half2(_decoded(pair), scale))
      some = sums[4 * product : 4 * product + 4]
      for part in parts:
        some = ptx.mma_16x8x16(some, halves, part)
      out += some
    return out

  def _meet(self, largest, norm, sums):
    """Adds the warps' sums, and writes the chunk's."""
    plan = self.plan
    for distance in (4, 8, 16):
      norm = [mlir.add_f32(x, ptx.from_lane(x, distance)) for x in norm]
    first = mlir.equal(self.row, 0)
    for n in range(2):
      own = self._shared(self._place(self.warp, n))
      mlir.when(first, partial(ptx.store_shared_f32, own, largest[n]))
      own = mlir.add(own, 4 * _WARPS * _QUERIES)
      mlir.when(first, partial(ptx.store_shared_f32, own, norm[n]))
    ptx.block_barrier()
    factors = []
    for n in range(2):
      everywhere = self._largest(mlir.add(mlir.shl(self.column, 1), n))
      factor = ptx.exp2(mlir.sub_f32(largest[n], everywhere))
      factors.append(mlir.mul_f32(factor, mlir.const_f32(packed.EPILOGUE)))
    for n, value in enumerate(sums):
      query = mlir.add(mlir.shl(self.column, 1), n % 2)
      line = mlir.add(mlir.mul(self.warp, _QUERIES), query)
      place = mlir.add(mlir.mul(line, plan.width), plan.sums_at)
      element = mlir.add(mlir.mul(self.row, plan.lane_bytes), n // 2)
      place = self._shared(mlir.add(place, element))
      ptx.store_shared_f32(place, mlir.mul_f32(value, factors[n % 2]))
    ptx.block_barrier()
    self._write()

  def _place(self, warp, n):
    """Word of a warp's largest score of query head 2 column + n."""
    query = mlir.add(mlir.shl(self.column, 1), n)
    return mlir.add(mlir.mul(warp, _QUERIES), query)

  def _shared(self, word):
    return mlir.add(self.shared, mlir.shl(word, 2))

  def _largest(self, query):
    """Over all warps, for a query head."""
    place = self._shared(query)
    value = ptx.load_shared_f32(place)
    for warp in range(1, _WARPS):
      other = ptx.load_shared_f32(place, 4 * _QUERIES * warp)
      value = mlir.max_f32(value, other)
    return value

  def _write(self):
    plan = self.plan
    size = plan.group * plan.width
    for begin in range(0, size, THREADS):
      index = mlir.add(self.thread, begin)
      exists = mlir.less(index, size)
      index = mlir.minimum(index, size - 1)
      place = self._shared(mlir.add(index, plan.sums_at))
      total = ptx.load_shared_f32(place)
      for warp in range(1, _WARPS):
        more = ptx.load_shared_f32(place, 4 * _QUERIES * plan.width * warp)
        total = mlir.add_f32(total, more)
      mlir.when(exists, partial(self._store, "sums", size, index, total))
    query = mlir.minimum(self.thread, plan.group - 1)
    exists = mlir.less(self.thread, plan.group)
    largest = self._largest(query)
    norm = self._norm(query, largest)
    for name, value in (("largest", largest), ("norm", norm)):
      store = partial(self._store, name, plan.group, query, value)
      mlir.when(exists, store)

  def _norm(self, query, largest):
    """The sum of all weights, relative to the largest score."""
    place, total = self._shared(query), mlir.zero_f32()
    for warp in range(_WARPS):
      score = ptx.load_shared_f32(place, 4 * _QUERIES * warp)
      norm = ptx.load_shared_f32(place, 4 * _QUERIES * (_WARPS + warp))
      weight = ptx.exp2(mlir.sub_f32(score, largest))
      total = ptx.fma(norm, weight, total)
    return total

  def _store(self, name, block_size, index, value):
    line = mlir.offset(self.at[name], self.block, 4 * block_size)
    ptx.store_global_f32(mlir.offset(line, index, 4), value)


def _pairs(values):
  return [values[n : n + 2] for n in range(0, len(values), 2)]


def _split(pair):
  """Two float32 as two float16 pairs that add to them."""
  upper = ptx.half2(*pair)
  rest = [
    mlir.sub_f32(x, rounded)
    for x, rounded in zip(pair, ptx.half2_to_f32(upper), strict=True)
  ]
  return upper, ptx.half2(*rest)


def _decoded(pair):
  """E2M5 bytes in the upper halves of a word, as float16 times 2^-14."""
  magnitude = mlir.and_(mlir.shr(pair, 3), 0x0FE00FE0)
  return mlir.or_(mlir.and_(pair, 0x80008000), magnitude)


def _load_words(address, count):
  if count == 2:
    return ptx.load_global2(address)
  words = []
  for n in range(0, count, 4):
    words += ptx.load_global4(mlir.add_wide(address, 4 * n))
  return words
