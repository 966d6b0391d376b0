"""Functions of jax.numpy on scalars, as operations of one thread.

The number formats are defined once, by the functions of `formats`. A kernel
traces them and emits what they do, operation by operation.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90.mlir import Value


def run(function: Callable[..., Any], *values: Value) -> list[Value]:
  """Emits a function of scalars.

  Args:
    function: Of float32 and bool scalars, to scalars.
    *values: Its arguments, f32 or i1.

  Returns:
    Its results, in the order of their leaves.

  Raises:
    PrecisionError: It uses an operation that is not known here.
  """
  types = [
    jax.ShapeDtypeStruct((), jnp.float32 if _is_float(one) else jnp.bool_)
    for one in values
  ]
  traced = jax.make_jaxpr(function)(*types)
  return _emit(traced.jaxpr, traced.consts, values)


def _is_float(value):
  return isinstance(value.type, ir.F32Type)


def _emit(jaxpr, consts, arguments):
  known = dict(zip(jaxpr.invars, arguments, strict=True))
  for variable, value in zip(jaxpr.constvars, consts, strict=True):
    known[variable] = _constant(value, variable.aval.dtype)

  def read(atom):
    if isinstance(atom, Literal):
      return _constant(atom.val, cast(Any, atom.aval).dtype)
    return known[atom]

  for eqn in jaxpr.eqns:
    operands = [read(atom) for atom in eqn.invars]
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if eqn.primitive.name == "optimization_barrier":
      out = operands
    elif inner is not None:
      out = _emit(inner.jaxpr, inner.consts, operands)
    else:
      out = [_operation(eqn, operands)]
    known |= dict(zip(eqn.outvars, out, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _constant(value, dtype):
  if dtype == jnp.float32:
    return mlir.const_f32(float(value))
  if dtype == jnp.bool_:
    return _bit(bool(value))
  return mlir.const(int(value) % 2**32)


def _bit(value):
  kind = ir.IntegerType.get_signless(1)
  return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _operation(eqn, operands: Sequence[Value]) -> Value:
  name = eqn.primitive.name
  if name == "convert_element_type":
    return _convert(operands[0], eqn.outvars[0].aval.dtype)
  if name == "bitcast_convert_type":
    return arith.bitcast(_type(eqn.outvars[0].aval.dtype), operands[0])
  table = _FLOAT if _is_float(operands[0]) else _INTEGER
  if name not in table:
    kind = operands[0].type
    raise PrecisionError(f"no operation of a kernel for {name} of {kind}")
  return table[name](*operands)


def _type(dtype):
  return mlir.f32() if dtype == jnp.float32 else mlir.i32()


def _convert(value, dtype):
  if _is_float(value):
    if dtype == jnp.float32:
      return value
    return arith.fptosi(mlir.i32(), value)
  narrow = ir.IntegerType(value.type).width == 1
  if dtype == jnp.bool_:
    return value if narrow else _compare_int("ne")(value, mlir.const(0))
  value = arith.extui(mlir.i32(), value) if narrow else value
  if dtype == jnp.float32:
    return arith.sitofp(mlir.f32(), value)
  # An int8 is held in 32 bits.
  return value


def _compare(predicate):
  kind = getattr(arith.CmpFPredicate, predicate)
  return lambda a, b: arith.cmpf(kind, a, b)


def _compare_int(predicate):
  kind = getattr(arith.CmpIPredicate, predicate)
  return lambda a, b: arith.cmpi(kind, a, b)


def _select(condition, false, true):
  return arith.select(condition, true, false)


def _sign(x):
  zero = mlir.const_f32(0.0)
  one, minus = mlir.const_f32(1.0), mlir.const_f32(-1.0)
  negative = _compare("OLT")(x, zero)
  positive = _compare("OGT")(x, zero)
  return _select(positive, _select(negative, x, minus), one)


_FLOAT = {
  "abs": math.absf,
  "add": arith.addf,
  "ceil": math.ceil,
  "div": arith.divf,
  "eq": _compare("OEQ"),
  "ge": _compare("OGE"),
  "gt": _compare("OGT"),
  "lt": _compare("OLT"),
  "max": arith.maximumf,
  "min": arith.minimumf,
  "mul": arith.mulf,
  "ne": _compare("UNE"),
  "neg": arith.negf,
  "round": math.roundeven,
  "sign": _sign,
  "square": lambda x: arith.mulf(x, x),
  "sub": arith.subf,
}

_INTEGER = {
  "add": arith.addi,
  "and": arith.andi,
  "lt": _compare_int("slt"),
  "max": arith.maxsi,
  "min": arith.minsi,
  "or": arith.ori,
  "select_n": _select,
  "shift_left": arith.shli,
  "shift_right_arithmetic": arith.shrsi,
  "sub": arith.subi,
}
