"""Adds what the blocks of `decode_sm90.py` left of each query head.

XLA makes four kernels of the same sums.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.launch import launch
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.operands import Operands

THREADS = 128


def join(
  sums: Float[Array, "N P G W"],
  largest: Float[Array, "N P G"],
  norm: Float[Array, "N P G"],
) -> Float[Array, "N G W"]:
  """Weighted values over all P chunks of each request and key head.

  Args:
    sums: Of each chunk, relative to its largest score.
    largest: That score, a power of 2.
    norm: Of each chunk, its sum of weights.
  """
  count, chunks, group, width = sums.shape
  plan = Plan(count=count, chunks=chunks, group=group, width=width)
  return launch(
    lambda *refs: Body(plan, *refs).emit(),
    {"sums": sums, "largest": largest, "norm": norm},
    {"out": jax.ShapeDtypeStruct((count, group, width), jnp.float32)},
    name="join_attention",
    blocks=plan.blocks,
    threads=THREADS,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static numbers: those of the arguments' shapes."""

  count: int
  chunks: int
  group: int
  width: int

  @property
  def blocks(self) -> int:
    """One for each query head."""
    return self.count * self.group


class Body(Operands):
  """Emits the kernel while it is traced."""

  def __init__(self, plan: Plan, names: Sequence[str], *refs: Value):
    super().__init__(names, *refs)
    self.plan = plan
    pair = mlir.div(self.block, plan.group)
    head = mlir.rem(self.block, plan.group)
    # Of the first chunk; each further one lies `group` on.
    self.first = mlir.add(mlir.mul(pair, plan.chunks * plan.group), head)

  def emit(self) -> None:
    """Everything, in order."""
    plan = self.plan
    weights = self._weights()
    for first in range(0, plan.width, THREADS):
      element = mlir.add(self.thread, first)
      exists = mlir.less(element, plan.width)
      element = mlir.minimum(element, plan.width - 1)
      total = mlir.zero_f32()
      for chunk, weight in enumerate(weights):
        line = mlir.offset(self.at["sums"], self._row(chunk), 4 * plan.width)
        value = ptx.load_global_f32(mlir.offset(line, element, 4))
        total = ptx.fma(value, weight, total)
      line = mlir.offset(self.at["out"], self.block, 4 * plan.width)
      place = mlir.offset(line, element, 4)
      mlir.when(exists, partial(ptx.store_global_f32, place, total))

  def _row(self, chunk):
    return mlir.add(self.first, chunk * self.plan.group)

  def _weights(self):
    """What each chunk counts; together with its weights they add to 1."""
    chunks = range(self.plan.chunks)

    def load(name):
      return [
        ptx.load_global_f32(mlir.offset(self.at[name], self._row(chunk), 4))
        for chunk in chunks
      ]

    scores, norms = load("largest"), load("norm")
    largest = scores[0]
    for score in scores[1:]:
      largest = mlir.max_f32(largest, score)
    weights, total = [], mlir.zero_f32()
    for score, norm in zip(scores, norms, strict=True):
      weights.append(ptx.exp2(mlir.sub_f32(score, largest)))
      total = ptx.fma(weights[-1], norm, total)
    return [mlir.div_f32(weight, total) for weight in weights]
