"""MLIR values and the few operations on them that the kernels are made of.

Everything here runs while a kernel is traced by `plgpu.inline_mgpu`, whose body
is written in MLIR: Pallas has no public operation for float16 pairs in 32-bit
registers, `mma.sync`, or copies by the copy engine into a ring whose parts
differ. This file and `scalars.py` alone import jaxlib's MLIR bindings and
Mosaic's helpers, which come without a promise of stability; the rest of the
kernels builds on the names below. Values are 32-bit integers unless said
otherwise; a pair of float16 travels as one.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

from jax.experimental.mosaic.gpu import utils as mosaic
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import scf

Value = ir.Value


def i32() -> ir.Type:
  """The 32-bit integer type."""
  return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
  """The 64-bit integer type."""
  return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
  """The float32 type."""
  return ir.F32Type.get()


def const(value: int) -> Value:
  """A 32-bit constant."""
  signed = value if value < 2**31 else value - 2**32
  return arith.constant(i32(), ir.IntegerAttr.get(i32(), signed))


def const_f32(value: float) -> Value:
  """A float32 constant."""
  return arith.constant(f32(), ir.FloatAttr.get(f32(), value))


def zero_f32() -> Value:
  """Float32 zero."""
  return const_f32(0.0)


def add(a: Value, b: Value | int) -> Value:
  """Sum."""
  return arith.addi(a, as_value(b))


def sub(a: Value, b: Value | int) -> Value:
  """Difference."""
  return arith.subi(a, as_value(b))


def mul(a: Value, b: Value | int) -> Value:
  """Product."""
  return arith.muli(a, as_value(b))


def div(a: Value, b: int) -> Value:
  """Unsigned quotient."""
  return arith.divui(a, const(b))


def rem(a: Value, b: int) -> Value:
  """Unsigned remainder."""
  return arith.remui(a, const(b))


def shl(a: Value, b: int) -> Value:
  """Shift to the left."""
  return a if b == 0 else arith.shli(a, const(b))


def shr(a: Value, b: int) -> Value:
  """Shift to the right, zeros coming in."""
  return a if b == 0 else arith.shrui(a, const(b))


def and_(a: Value, b: Value | int) -> Value:
  """Bits in both."""
  return arith.andi(a, as_value(b))


def or_(a: Value, b: Value | int) -> Value:
  """Bits in either."""
  return arith.ori(a, as_value(b))


def xor(a: Value, b: Value | int) -> Value:
  """Bits in one alone."""
  return arith.xori(a, as_value(b))


def less(a: Value, b: Value | int) -> Value:
  """Unsigned comparison."""
  return arith.cmpi(arith.CmpIPredicate.ult, a, as_value(b))


def equal(a: Value, b: Value | int) -> Value:
  """Whether two integers are equal."""
  return arith.cmpi(arith.CmpIPredicate.eq, a, as_value(b))


def both(a: Value, b: Value) -> Value:
  """Whether two conditions hold."""
  return arith.andi(a, b)


def select(condition: Value, a: Value, b: Value) -> Value:
  """One of two values."""
  return arith.select(condition, a, b)


def minimum(a: Value, b: Value | int) -> Value:
  """The lesser, unsigned."""
  return arith.minui(a, as_value(b))


def add_f32(a: Value, b: Value) -> Value:
  """Sum of float32."""
  return arith.addf(a, b)


def mul_f32(a: Value, b: Value) -> Value:
  """Product of float32."""
  return arith.mulf(a, b)


def sub_f32(a: Value, b: Value) -> Value:
  """Difference of float32."""
  return arith.subf(a, b)


def max_f32(a: Value, b: Value) -> Value:
  """The greater of float32, NaN where one is."""
  return arith.maximumf(a, b)


def as_f32(bits: Value) -> Value:
  """Bits as a float32."""
  return arith.bitcast(f32(), bits)


def div_f32(a: Value, b: Value) -> Value:
  """Quotient of float32."""
  return arith.divf(a, b)


def as_value(x: Value | int) -> Value:
  """A Python integer as a constant."""
  return const(x) if isinstance(x, int) else x


@overload
def asm(
  text: str, results: None, *operands: Value, volatile: bool = ...
) -> None: ...
@overload
def asm(
  text: str, results: ir.Type, *operands: Value, volatile: bool = ...
) -> Value: ...
@overload
def asm(
  text: str, results: Sequence[ir.Type], *operands: Value, volatile: bool = ...
) -> tuple[Value, ...]: ...
def asm(
  text: str,
  results: Sequence[ir.Type] | ir.Type | None,
  *operands: Value,
  volatile: bool = False,
) -> Value | tuple[Value, ...] | None:
  """One PTX statement; volatile ones keep their order and fence memory."""
  one = isinstance(results, ir.Type)
  types = [results] if one else list(results or ())
  constraints = ["=" + _letter(t) for t in types]
  constraints += [_letter(operand.type) for operand in operands]
  if volatile:
    constraints.append("~{memory}")
  if not types:
    returned = ir.Type.parse("!llvm.void")
  elif len(types) == 1:
    returned = types[0]
  else:
    returned = llvm.StructType.get_literal(types)
  out = _statement(returned, operands, text, constraints, volatile)
  if not types:
    return None
  if one:
    return out
  if len(types) == 1:
    return (out,)
  return tuple(llvm.extractvalue(t, out, [n]) for n, t in enumerate(types))


def _statement(returned, operands, text, constraints, volatile) -> Any:
  return llvm.inline_asm(
    returned,
    list(operands),
    text,
    ",".join(constraints),
    has_side_effects=volatile,
  )


def asm_in_place(
  text: str, acc: Sequence[Value], *operands: Value
) -> tuple[Value, ...]:
  """A PTX statement that updates `acc`; keeps its order."""
  count = len(acc)
  types = [value.type for value in acc]
  constraints = ["=" + _letter(one) for one in types]
  constraints += [str(n) for n in range(count)]
  constraints += [_letter(operand.type) for operand in operands]
  constraints.append("~{memory}")
  returned = llvm.StructType.get_literal(types)
  out = _statement(returned, [*acc, *operands], text, constraints, True)
  return tuple(llvm.extractvalue(t, out, [n]) for n, t in enumerate(types))


def _letter(t):
  if isinstance(t, ir.IntegerType):
    width = ir.IntegerType(t).width
    return {1: "b", 16: "h", 32: "r", 64: "l"}[width]
  return "f"


def loop(
  count: int | Value,
  carried: Sequence[Value],
  body: Callable[[Value, list[Value]], Sequence[Value]],
) -> list[Value]:
  """`for i in range(count): carried = body(i, carried)`."""
  if isinstance(count, int) and count == 0:
    return list(carried)
  for_op = scf.ForOp(const(0), as_value(count), const(1), list(carried))
  with ir.InsertionPoint(for_op.body):
    out = body(for_op.induction_variable, list(for_op.inner_iter_args))
    scf.YieldOp(list(out))
  return list(for_op.results)


def when(condition: Value, body: Callable[[], None]) -> None:
  """Runs `body` where `condition` holds."""
  with mosaic.when(condition):
    body()


def global_address(ref: Value) -> Value:
  """64-bit address of a reference in device memory."""
  return llvm.ptrtoint(i64(), mosaic.memref_ptr(ref))


def shared_address(ref: Value) -> Value:
  """32-bit address of a reference in shared memory."""
  pointer = mosaic.memref_ptr(ref)
  return arith.trunci(i32(), llvm.ptrtoint(i64(), pointer))


def offset(address: Value, elements: Value, size: int = 1) -> Value:
  """64-bit address plus a 32-bit number of elements."""
  wide = arith.extui(i64(), elements)
  if size != 1:
    wide = arith.muli(wide, arith.constant(i64(), size))
  return arith.addi(address, wide)


def add_wide(a: Value, b: int) -> Value:
  """64-bit addition of a constant."""
  return arith.addi(a, arith.constant(i64(), ir.IntegerAttr.get(i64(), b)))


def warp_index() -> Value:
  """This thread's warp, the same in all its lanes."""
  return mosaic.warp_idx()


def or_wide(a: Value, bits: int) -> Value:
  """Bits of a 32-bit value, widened to 64, or of a constant."""
  wide = arith.extui(i64(), a)
  return arith.ori(wide, arith.constant(i64(), ir.IntegerAttr.get(i64(), bits)))
