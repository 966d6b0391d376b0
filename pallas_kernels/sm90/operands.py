"""Where a kernel's operands lie, and which thread runs."""

from collections.abc import Sequence

from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.mlir import Value


class Operands:
  """What the body of a kernel begins with, emitted while it is traced.

  Args:
    names: Of the operands in device memory, results last.
    *refs: The same, then the block's shared memory where it has any.

  Attributes:
    at: 64-bit address of each operand.
    shared: 32-bit address of the block's shared memory.
    thread: Of the block.
    lane: Of the warp.
    block: Of the grid.
  """

  def __init__(self, names: Sequence[str], *refs: Value):
    self.at = {
      name: mlir.global_address(ref)
      for name, ref in zip(names, refs[: len(names)], strict=True)
    }
    for ref in refs[len(names) :]:
      self.shared = mlir.shared_address(ref)
    self.thread = ptx.special("tid.x")
    self.lane = mlir.and_(self.thread, 31)
    self.block = ptx.special("ctaid.x")
