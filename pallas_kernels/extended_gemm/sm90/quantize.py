"""Quantizes rows in the order in which the GEMM reads them, in one kernel.

XLA makes six kernels of the same, which for a few rows take longer than the
product itself. What comes before, a norm or a gate, is taken in: it would be
kernels of its own, too.

A thread quantizes one subgroup. Each block reads its whole row to find the
largest magnitude, so that blocks need not wait for each other.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm.before import Before
from autoematic_jax.pallas_kernels.extended_gemm.before import Gate
from autoematic_jax.pallas_kernels.extended_gemm.before import Norm
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import group
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90 import scalars
from autoematic_jax.pallas_kernels.sm90.launch import launch
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.operands import Operands

THREADS = 256
_WARPS = THREADS // 32


def quantize_in_order(
  x: Float[Array, "M K"],
  levels: Int[Array, "M"],
  sources: Int[Array, "L Q"],
  layer: Int[Array, ""],
  *,
  config: ActivationConfig,
  refine: bool,
  before: Before = None,
) -> tuple[Float[Array, "M C"], Float[Array, "M"]]:
  """`quantize_rows`, its elements times their group scales, in another order.

  Args:
    x: Activations; of a gate, `[M, 2 K]`.
    levels: 4 or 6 for each row.
    sources: Which subgroup of the K columns each place takes in each layer,
      those of a group side by side; past K are zeros.
    layer: Which layer.
    config: Threshold and step; masks must be allowed to overlap.
    refine: Whether rows may be at 6 bits.
    before: What is done to x first.

  Returns:
    float16 values, and the tensor scale of each row.

  Raises:
    PrecisionError: The config keeps masks apart, or K is not a multiple of 4.
  """
  if not config.overlapping:
    raise PrecisionError(
      "this kernel refines activations wherever their error asks for it;"
      " quantize_rows keeps the masks apart"
    )
  rows, width = x.shape
  columns = width // 2 if isinstance(before, Gate) else width
  if columns % 4:
    raise PrecisionError(f"{columns} columns are not whole subgroups of 4")
  plan = _Plan(
    rows=rows,
    columns=columns,
    places=sources.shape[1],
    config=config,
    refine=refine,
    gated=isinstance(before, Gate),
    epsilon=before.epsilon if isinstance(before, Norm) else None,
  )
  operands = {
    "x": x.astype(jnp.float32),
    "levels": levels,
    "sources": sources,
    "layer": layer.reshape(1),
  }
  if isinstance(before, Norm):
    operands["norm"] = before.scale
  return launch(
    lambda *refs: _Body(plan, *refs).emit(),
    operands,
    {
      "values": jax.ShapeDtypeStruct((rows, 4 * plan.places), jnp.float16),
      "scale": jax.ShapeDtypeStruct((rows,), jnp.float32),
    },
    name="quantize_rows",
    blocks=rows * plan.blocks,
    threads=THREADS,
    shared_words=2 * _WARPS,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
  """Static numbers; `epsilon` is that of a norm, None where there is none."""

  rows: int
  columns: int
  places: int
  config: ActivationConfig
  refine: bool
  gated: bool
  epsilon: float | None

  @property
  def blocks(self) -> int:
    """Of a row."""
    return -(-self.places // THREADS)

  @property
  def subgroups(self) -> int:
    return self.columns // 4

  @property
  def width(self) -> int:
    return self.columns * (2 if self.gated else 1)


class _Body(Operands):
  """Emits the kernel while it is traced."""

  def __init__(self, plan: _Plan, names: Sequence[str], *refs: Value):
    super().__init__(names, *refs)
    self.plan = plan
    self.row = mlir.div(self.block, plan.blocks)
    self.part = mlir.rem(self.block, plan.blocks)
    self.layer = ptx.load_global(self.at["layer"])
    self.line = mlir.offset(self.at["x"], self.row, 4 * plan.width)
    self.inverse_norm: Value | None = None
    if plan.epsilon is not None:
      self.norm = mlir.offset(self.at["norm"], self.layer, 4 * plan.columns)

  def emit(self) -> None:
    """Everything, in order."""
    plan = self.plan
    place = mlir.add(mlir.mul(self.part, THREADS), self.thread)
    exists = mlir.less(place, plan.places)
    # Threads past the last place do as the last group does, and store nothing.
    some = mlir.and_(place, 3)
    place = mlir.minimum(place, mlir.add(some, plan.places - 4))
    source = mlir.offset(self.at["sources"], self.layer, 4 * plan.places)
    source = ptx.load_global(mlir.offset(source, place, 4))
    six = None
    if plan.refine:
      level = ptx.load_global(mlir.offset(self.at["levels"], self.row, 4))
      six = mlir.less(mlir.const(5), level)
    row_amax = self._row_amax()
    (tensor_scale,) = scalars.run(group.tensor_scale, row_amax)
    x = self._subgroup(source)
    (amax,) = scalars.run(group.largest_magnitude, *x)
    for distance in (1, 2):
      amax = self._greater(amax, ptx.from_lane(amax, distance))
    values = self._quantized(x, amax, tensor_scale, six)
    target = mlir.offset(self.at["values"], self.row, 8 * plan.places)
    target = mlir.offset(target, place, 8)
    pairs = [ptx.half2(*values[:2]), ptx.half2(*values[2:])]
    mlir.when(exists, partial(ptx.store_global2, target, pairs))
    first = mlir.both(mlir.equal(self.thread, 0), mlir.equal(self.part, 0))
    scale = mlir.offset(self.at["scale"], self.row, 4)
    mlir.when(first, partial(ptx.store_global_f32, scale, tensor_scale))

  def _quantized(self, x, amax, tensor_scale, six):
    config = self.plan.config

    def quantized(a, b, c, d, amax, tensor_scale, *six):
      level = six[0] if six else None
      return group.quantized([a, b, c, d], amax, tensor_scale, level, config)

    known = [] if six is None else [six]
    return scalars.run(quantized, *x, amax, tensor_scale, *known)

  def _greater(self, a, b):
    return scalars.run(jnp.maximum, a, b)[0]

  def _row_amax(self):
    """Largest magnitude of the row, after what comes before."""
    if self.plan.epsilon is not None:
      self._find_norm(self.plan.epsilon)
    amax = mlir.zero_f32()
    for x in self._turns():
      (largest,) = scalars.run(group.largest_magnitude, *x)
      amax = self._greater(amax, largest)
    return self._over_block(amax, self._greater, 0)

  def _find_norm(self, epsilon):
    plan = self.plan
    total = mlir.zero_f32()
    for x in self._turns():
      for value in x:
        total = mlir.add_f32(total, mlir.mul_f32(value, value))
    total = self._over_block(total, mlir.add_f32, 4 * _WARPS)
    mean = mlir.mul_f32(total, mlir.const_f32(1 / plan.columns))
    self.inverse_norm = ptx.rsqrt(mlir.add_f32(mean, mlir.const_f32(epsilon)))

  def _turns(self):
    """Subgroups of the row that this thread looks at, all loads first."""
    plan = self.plan
    loaded = []
    for first in range(0, plan.subgroups, THREADS):
      index = mlir.add(self.thread, first)
      exists = None
      if first + THREADS > plan.subgroups:
        exists = mlir.less(index, plan.subgroups)
        index = mlir.minimum(index, plan.subgroups - 1)
      loaded.append((self._load(index), exists))
    return [self._done(raw, exists) for raw, exists in loaded]

  def _subgroup(self, source):
    exists = mlir.less(source, self.plan.subgroups)
    index = mlir.minimum(source, self.plan.subgroups - 1)
    return self._done(self._load(index), exists)

  def _load(self, index):
    """A subgroup of x, and what its norm or gate needs beside it."""
    here = mlir.offset(self.line, index, 16)
    raw = [ptx.load_global4_f32(here)]
    if self.plan.gated:
      there = mlir.add_wide(here, 4 * self.plan.columns)
      raw.append(ptx.load_global4_f32(there))
    elif self.inverse_norm is not None:
      raw.append(ptx.load_global4_f32(mlir.offset(self.norm, index, 16)))
    return raw

  def _done(self, raw, exists):
    x, *more = raw
    if self.plan.gated:
      x = [_gated(a, b) for a, b in zip(x, more[0], strict=True)]
    elif self.inverse_norm is not None:
      x = [
        mlir.mul_f32(mlir.mul_f32(a, self.inverse_norm), b)
        for a, b in zip(x, more[0], strict=True)
      ]
    if exists is None:
      return list(x)
    return [mlir.select(exists, value, mlir.zero_f32()) for value in x]

  def _over_block(self, value, combine, at):
    """Combines every thread's value, in one order in all of them."""
    for distance in (16, 8, 4, 2, 1):
      value = combine(value, ptx.from_lane(value, distance))
    base = mlir.add(self.shared, at)
    mine = mlir.add(base, mlir.shl(mlir.shr(self.thread, 5), 2))
    store = partial(ptx.store_shared_f32, mine, value)
    mlir.when(mlir.equal(self.lane, 0), store)
    ptx.block_barrier()
    parts = []
    for first in range(0, _WARPS, 4):
      parts += ptx.load_shared4_f32(base, 4 * first)
    total = parts[0]
    for part in parts[1:]:
      total = combine(total, part)
    return total


def _gated(gate, up):
  """`silu(gate) * up`."""
  power = ptx.exp2(mlir.mul_f32(gate, mlir.const_f32(-math.log2(math.e))))
  below = mlir.add_f32(power, mlir.const_f32(1.0))
  return mlir.mul_f32(mlir.div_f32(gate, below), up)
