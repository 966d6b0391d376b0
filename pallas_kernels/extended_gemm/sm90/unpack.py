"""A layer decoded to float16 in device memory, for products of many rows.

A block of warps takes one tile of 16 weight rows in one slice of K; its warps
take the steps of 64 columns in turn. Nothing is kept in shared memory: a lane
reads its 16 bytes and stores 16 bytes at a time. So that four lanes store 64
bytes side by side, a step's columns are the first two words of its four groups,
then their last two (`column_sources`).

Where rows of x are at both levels, the offsets are decoded to columns of their
own, behind those of the base: the extended-K form of the paper (section 3.3).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.pallas_kernels.extended_gemm.fragments import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import GROUPS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import ROWS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import UNIT_BYTES
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Mode
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx
from autoematic_jax.pallas_kernels.sm90.launch import launch
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.operands import Operands

WARPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnpackPlan:
  """Static numbers of one kernel.

  Attributes:
    rows: Rows of the weight.
    row_blocks: Groups of `tiles` tiles in which it is packed.
    tiles: Tiles of 16 rows of such a group.
    slices: Parts of K.
    steps: Steps of 64 columns of a slice.
    doubles: How many of them have two refined words.
    singles: How many have one.
    exponent: Whether the offsets' step grows with the value.
    mode: `4` writes the base, `6` adds the offsets to it, `mixed` writes them
      behind it.
  """

  rows: int
  row_blocks: int
  tiles: int
  slices: int
  steps: int
  doubles: int
  singles: int
  exponent: bool
  mode: Mode

  @property
  def base_columns(self) -> int:
    """Columns of the base."""
    return self.slices * self.steps * COLUMNS

  @property
  def slice_offsets(self) -> int:
    """Columns of a slice's offsets."""
    return (2 * self.doubles + self.singles) * COLUMNS // 4

  @property
  def columns(self) -> int:
    """Columns of the result."""
    if self.mode != "mixed":
      return self.base_columns
    return self.base_columns + self.slices * self.slice_offsets

  @property
  def runs(self) -> list[tuple[int, int, int]]:
    """Runs of steps alike: first, one past the last, refined words."""
    ends = (self.doubles, self.doubles + self.singles, self.steps)
    if self.mode == "4":
      ends = (0, 0, self.steps)
    runs = zip((0, *ends[:2]), ends, (2, 1, 0), strict=True)
    return [run for run in runs if run[1] > run[0]]


def plan_of(weight: FragmentWeight, mode: Mode) -> UnpackPlan:
  """The kernel's numbers; a weight without offsets is decoded at `4`."""
  return UnpackPlan(
    rows=weight.rows,
    row_blocks=weight.units.shape[1],
    tiles=weight.tiles,
    slices=weight.slices,
    steps=weight.units.shape[2] // weight.slices,
    doubles=weight.doubles,
    singles=weight.singles,
    exponent=weight.decoding == "exponent",
    mode=mode if weight.offsets is not None else "4",
  )


def column_sources(
  plan: UnpackPlan, sources: Int[Array, "Q"]
) -> Int[Array, "R"]:
  """Which subgroup of x each four columns of the result multiply.

  Args:
    plan: Of the kernel.
    sources: One layer's, in fragment order.
  """
  steps = sources.reshape(plan.slices, plan.steps, GROUPS, 2, 2)
  base = steps.swapaxes(2, 3).reshape(-1)
  if plan.mode != "mixed":
    return base
  # slice, step, group, word
  words = sources.reshape(plan.slices, plan.steps, GROUPS, 4)
  doubles = words[:, : plan.doubles, :, :2]
  singles = words[:, plan.doubles : plan.doubles + plan.singles, :, :1]
  refined = [one.reshape(plan.slices, -1) for one in (doubles, singles)]
  return jnp.concatenate([base, jnp.concatenate(refined, 1).reshape(-1)])


def unpack(
  weight: FragmentWeight, layer: Int[Array, "1"], *, mode: Mode
) -> Float[Array, "N C"]:
  """One layer as float16, columns in the order of `column_sources`.

  Args:
    weight: Stacked layers in fragment order.
    layer: Which of them.
    mode: What to write; see `UnpackPlan`.

  Returns:
    `[N, C]` float16, exact but for the tensor scale and a factor of
    `decode.EPILOGUE`, which are left out; zeros past K.
  """
  plan = plan_of(weight, mode)
  operands: dict[str, Array] = {"units": weight.units, "layer": layer}
  if plan.mode != "4" and weight.offsets is not None:
    operands["offsets"] = weight.offsets
  shape = (plan.rows, plan.columns)
  return launch(
    lambda *refs: _Body(plan, *refs).emit(),
    operands,
    {"out": jax.ShapeDtypeStruct(shape, jnp.float16)},
    name="unpack_weight",
    blocks=plan.row_blocks * plan.tiles * plan.slices,
    threads=32 * WARPS,
  )


class _Body(Operands):
  """Emits the kernel while it is traced."""

  def __init__(self, plan: UnpackPlan, names: Sequence[str], *refs: Value):
    super().__init__(names, *refs)
    self.plan = plan
    self.warp = mlir.warp_index()
    self.part = mlir.rem(self.block, plan.slices)
    tile = mlir.div(self.block, plan.slices)
    self.tile = mlir.rem(tile, plan.tiles)
    layer = ptx.load_global(self.at["layer"])
    self.row_block = mlir.add(
      mlir.mul(layer, plan.row_blocks), mlir.div(tile, plan.tiles)
    )
    self.row = mlir.add(mlir.shl(tile, 4), mlir.shr(self.lane, 2))

  def emit(self) -> None:
    """Everything, in order."""
    plan = self.plan
    index = mlir.add(mlir.mul(self.row_block, plan.slices), self.part)
    first = mlir.mul(index, plan.steps * plan.tiles)
    units = mlir.offset(
      self.at["units"], mlir.add(first, self.tile), UNIT_BYTES
    )
    self.words = mlir.offset(units, self.lane, 16)
    self.scales = mlir.add_wide(mlir.offset(units, self.lane, 2), 512)
    # A lane stores 16 bytes of the rows r and r + 8.
    group = mlir.and_(self.lane, 3)
    line = mlir.offset(self.at["out"], self.row, 2 * plan.columns)
    base = mlir.offset(line, self.part, 2 * plan.steps * COLUMNS)
    self.base = mlir.offset(base, group, 16)
    if plan.mode != "4":
      size = plan.tiles * (128 * plan.doubles + 64 * plan.singles)
      self.offsets = mlir.offset(self.at["offsets"], index, size)
    if plan.mode == "mixed":
      line = mlir.add_wide(line, 2 * plan.base_columns)
      self.delta = mlir.offset(line, self.part, 2 * plan.slice_offsets)
    for begin, end, kind in plan.runs:
      count = end - begin + WARPS - 1
      turns = mlir.div(mlir.sub(mlir.const(count), self.warp), WARPS)

      def body(i, _, begin=begin, kind=kind):
        turn = mlir.add(mlir.mul(i, WARPS), self.warp)
        self._step(mlir.add(turn, begin), begin, turn, kind)
        return []

      mlir.loop(turns, [], body)

  def _step(self, step, begin, turn, kind):
    """Decodes one unit.

    Args:
      step: Of the slice.
      begin: The first of its run.
      turn: Steps from there.
      kind: Refined words.
    """
    plan = self.plan
    stride = UNIT_BYTES * plan.tiles
    words = ptx.load_global4(mlir.offset(self.words, step, stride))
    scales = decode.decode_scales(
      ptx.load_global16(mlir.offset(self.scales, step, stride))
    )
    offsets = self._offsets(turn, kind)
    base, delta = [], []
    for kk, word in enumerate(words):
      pairs = decode.decode_pairs(word)
      if kk < kind and plan.mode == "mixed":
        step_of = decode.offset_pairs(pairs, offsets, kk, plan.exponent)
        delta.append(decode.scale_pairs(step_of, scales))
      elif kk < kind:
        pairs = decode.refine_pairs(pairs, offsets, kk, plan.exponent)
      base.append(decode.scale_pairs(pairs, scales))
    target = mlir.offset(self.base, step, 2 * COLUMNS)
    for half in range(2):
      self._store(half, target, base[:2], 0)
      self._store(half, target, base[2:], 64)
      if delta:
        self._store(half, self._delta_target(begin, turn, kind), delta, 0)

  def _offsets(self, turn, kind):
    """This lane's offsets of a step: two bytes a refined word."""
    if not kind:
      return None
    tiles, doubles = self.plan.tiles, self.plan.doubles
    before = 0 if kind == 2 else 128 * doubles * tiles
    at = mlir.add(mlir.mul(turn, tiles), self.tile)
    address = mlir.offset(self.offsets, at, 64 * kind)
    address = mlir.offset(mlir.add_wide(address, before), self.lane, 2 * kind)
    return (ptx.load_global if kind == 2 else ptx.load_global16)(address)

  def _delta_target(self, begin, turn, kind):
    """Where this lane's offsets of a step go: 4 columns a refined word."""
    before = 2 * begin if kind == 1 else 0
    at = mlir.offset(self.delta, turn, 2 * kind * COLUMNS // 4)
    at = mlir.add_wide(at, 2 * before * COLUMNS // 4)
    return mlir.offset(at, mlir.and_(self.lane, 3), 8 * kind)

  def _store(self, half, target, words, at):
    """One or two words' columns of row r + 8 * half."""
    plan = self.plan
    values = [word[2 * pair + half] for word in words for pair in range(2)]
    store = ptx.store_global4 if len(values) == 4 else ptx.store_global2
    at += half * 16 * plan.columns

    def write():
      store(target, values, at)

    if plan.rows % ROWS or plan.row_blocks * plan.tiles * ROWS > plan.rows:
      mlir.when(mlir.less(mlir.add(self.row, 8 * half), plan.rows), write)
    else:
      write()
