"""What comes between the projection of queries, keys and values and attention.

Queries and keys are normed and turned, keys and values are packed into the
cache in place: eleven kernels of XLA's, and more for every request. A warp
takes one head, a lane four elements at a time.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.attention import pack
from autoematic_jax.pallas_kernels.attention.heads import HeadNorms
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import group
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90 import scalars
from autoematic_jax.pallas_kernels.sm90.launch import launch
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.operands import Operands

THREADS = 128
_WARPS = THREADS // 32


def prepare(
  joined: Float[Array, "B J"],
  rope: tuple[Float[Array, "B F"], Float[Array, "B F"]],
  norms: HeadNorms | None,
  codes: UInt8[Array, "L B C S W"],
  scales: UInt8[Array, "L B C S G"],
  positions: Int[Array, "B"],
  levels: Int[Array, "B"],
  layer: Int[Array, "1"],
  *,
  config: ActivationConfig,
) -> tuple[
  Float[Array, "B H W"], UInt8[Array, "L B C S W"], UInt8[Array, "L B C S G"]
]:
  """Queries to attend with, and the cache with one more key and value.

  Args:
    joined: Heads of queries, of keys, and of values, side by side.
    rope: Cosines and sines of each request's position.
    norms: Of queries and keys, where there are such.
    codes: Of the cache: keys' heads, then values'; width as packed.
    scales: Of each 16 codes.
    positions: Where each request's key and value go.
    levels: 4 or 6 of each request.
    layer: Which layer.
    config: Step of the offsets.

  Returns:
    Queries times the root of their width, zeros past it; codes; scales.
  """
  cos, sin = rope
  dim, kv_heads = 2 * cos.shape[1], codes.shape[2] // 2
  plan = Plan(
    batch=joined.shape[0],
    heads=joined.shape[1] // dim - 2 * kv_heads,
    kv_heads=kv_heads,
    dim=dim,
    width=codes.shape[4],
    capacity=codes.shape[3],
    epsilon=norms.epsilon if norms is not None else None,
    config=config,
  )
  operands = {
    "joined": joined.astype(jnp.float32),
    "cos": cos,
    "sin": sin,
    "positions": positions,
    "levels": levels,
    "layer": layer,
  }
  if norms is not None:
    operands |= {"query_norm": norms.query, "key_norm": norms.key}
  shape = (plan.batch, plan.heads, plan.width)
  return launch(
    lambda *refs: Body(plan, *refs).emit(),
    operands,
    {"queries": jax.ShapeDtypeStruct(shape, jnp.float32)},
    updates={"codes": codes, "scales": scales},
    name="prepare_attention",
    blocks=plan.blocks,
    threads=THREADS,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static numbers.

  Attributes:
    batch: Requests.
    heads: Of queries.
    kv_heads: Of keys; as many of values.
    dim: Width of a head.
    width: The same, packed.
    capacity: Keys of a request.
    epsilon: Of the norms, None where there are none.
    config: Step of the offsets.
  """

  batch: int
  heads: int
  kv_heads: int
  dim: int
  width: int
  capacity: int
  epsilon: float | None
  config: ActivationConfig

  @property
  def all_heads(self) -> int:
    """Of queries, keys and values."""
    return self.heads + 2 * self.kv_heads

  @property
  def blocks(self) -> int:
    return -(-self.batch * self.all_heads // _WARPS)


class Body(Operands):
  """Emits the kernel while it is traced."""

  def __init__(self, plan: Plan, names: Sequence[str], *refs: Value):
    super().__init__(names, *refs)
    self.plan = plan
    number = mlir.add(mlir.mul(self.block, _WARPS), mlir.shr(self.thread, 5))
    count = plan.batch * plan.all_heads
    self.exists = mlir.less(number, count)
    # Warps past the last head do as it does, and store nothing.
    self.number = mlir.minimum(number, count - 1)
    self.request = mlir.div(self.number, plan.all_heads)
    self.head = mlir.rem(self.number, plan.all_heads)
    self.is_query = mlir.less(self.head, plan.heads)
    self.turns = mlir.less(self.head, plan.heads + plan.kv_heads)
    self.line = mlir.offset(self.at["joined"], self.number, 4 * plan.dim)
    self.layer = ptx.load_global(self.at["layer"])
    self.position = self._of_request("positions")
    self.six = mlir.less(mlir.const(5), self._of_request("levels"))

  def _of_request(self, name):
    return ptx.load_global(mlir.offset(self.at[name], self.request, 4))

  def emit(self) -> None:
    """Everything, in order."""
    plan = self.plan
    for first in range(0, plan.width // 4, 32):
      self.chunk = mlir.add(self.lane, first)
      x = self._turned(self._inverse_norm())
      self._store_query(x)
      self._store_packed(x)

  def _inverse_norm(self):
    """One over the root mean square of the head; None where none is normed."""
    plan = self.plan
    if plan.epsilon is None:
      return None
    total = mlir.zero_f32()
    for first in range(0, plan.width // 4, 32):
      for value in self._load(self.line, mlir.add(self.lane, first)):
        total = ptx.fma(value, value, total)
    for distance in (16, 8, 4, 2, 1):
      total = mlir.add_f32(total, ptx.from_lane(total, distance))
    mean = mlir.mul_f32(total, mlir.const_f32(1 / plan.dim))
    return ptx.rsqrt(mlir.add_f32(mean, mlir.const_f32(plan.epsilon)))

  def _load(self, line, chunk):
    """Four elements of a line as wide as the head, zeros past it."""
    plan = self.plan
    inside = mlir.less(chunk, plan.dim // 4)
    chunk = mlir.minimum(chunk, plan.dim // 4 - 1)
    values = ptx.load_global4_f32(mlir.offset(line, chunk, 16))
    return [mlir.select(inside, x, mlir.zero_f32()) for x in values]

  def _normed(self, chunk, inverse):
    x = self._load(self.line, chunk)
    if inverse is None:
      return x
    line = mlir.select(
      self.is_query, self.at["query_norm"], self.at["key_norm"]
    )
    line = mlir.offset(line, self.layer, 4 * self.plan.dim)
    scales = self._load(line, chunk)
    return [
      mlir.select(
        self.turns, mlir.mul_f32(mlir.mul_f32(value, inverse), scale), value
      )
      for value, scale in zip(x, scales, strict=True)
    ]

  def _turned(self, inverse):
    """Four elements, turned unless they are of a value."""
    half = self.plan.dim // 8
    first = mlir.less(self.chunk, half)
    # Chunks past the head's width are zeros; theirs may be anything inside.
    other = mlir.select(
      first, mlir.add(self.chunk, half), mlir.sub(self.chunk, half)
    )
    angle = mlir.minimum(mlir.select(first, self.chunk, other), half - 1)
    cos, sin = (self._table(name, angle) for name in ("cos", "sin"))
    x, partner = self._normed(self.chunk, inverse), self._normed(other, inverse)
    out = []
    for a, b, c, s in zip(x, partner, cos, sin, strict=True):
      across = mlir.mul_f32(b, s)
      across = mlir.select(first, mlir.sub_f32(mlir.zero_f32(), across), across)
      out.append(mlir.select(self.turns, ptx.fma(a, c, across), a))
    return out

  def _table(self, name, chunk):
    line = mlir.offset(self.at[name], self.request, 2 * self.plan.dim)
    return ptx.load_global4_f32(mlir.offset(line, chunk, 16))

  def _here(self):
    """Whether this lane has a chunk of a head."""
    chunk = mlir.less(self.chunk, self.plan.width // 4)
    return mlir.both(self.exists, chunk)

  def _store_query(self, x):
    plan = self.plan
    factor = mlir.const_f32(plan.dim**-0.5)
    inside = mlir.less(self.chunk, plan.dim // 4)
    bits = [
      mlir.select(inside, mlir.mul_f32(value, factor), mlir.zero_f32())
      for value in x
    ]
    row = mlir.add(mlir.mul(self.request, plan.heads), self.head)
    line = mlir.offset(self.at["queries"], row, 4 * plan.width)
    target = mlir.offset(line, self.chunk, 16)
    mlir.when(
      mlir.both(self._here(), self.is_query),
      partial(ptx.store_global4_f32, target, bits),
    )

  def _store_packed(self, x):
    plan = self.plan
    inside = mlir.less(self.chunk, plan.dim // 4)
    x = [mlir.select(inside, value, mlir.zero_f32()) for value in x]
    (amax,) = scalars.run(group.largest_magnitude, *x)
    for distance in (1, 2):
      (amax,) = scalars.run(jnp.maximum, amax, ptx.from_lane(amax, distance))

    def packed(a, b, c, d, amax, six):
      return pack.packed([a, b, c, d], amax, six, plan.config)

    word, scale = scalars.run(packed, *x, amax, self.six)
    row = mlir.add(mlir.mul(self.layer, plan.batch), self.request)
    row = mlir.add(
      mlir.mul(row, 2 * plan.kv_heads), mlir.sub(self.head, plan.heads)
    )
    row = mlir.add(mlir.mul(row, plan.capacity), self.position)
    target = mlir.offset(self.at["codes"], row, plan.width)
    target = mlir.offset(target, self.chunk, 4)
    stored = mlir.both(
      self._here(), mlir.less(mlir.const(plan.heads - 1), self.head)
    )
    mlir.when(stored, partial(ptx.store_global, target, word))
    target = mlir.offset(self.at["scales"], row, plan.width // 16)
    target = mlir.offset(target, mlir.shr(self.chunk, 2))
    first = mlir.equal(mlir.and_(self.lane, 3), 0)
    mlir.when(
      mlir.both(stored, first), partial(ptx.store_global8, target, scale)
    )
