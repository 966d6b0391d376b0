"""A packed quantized matrix and the invariant that it keeps."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, UInt8

from autoematic_jax.errors import QTensorError
from autoematic_jax.formats import autofp
from autoematic_jax.formats import elements
from autoematic_jax.formats import packing

Format = Literal["nvfp4", "fp6g", "autofp6", "autofp8"]

LEVELS: dict[str, tuple[int, ...]] = {
  "nvfp4": (2, 4),
  "fp6g": (6,),
  "autofp6": (2, 4, 6),
  "autofp8": (2, 4, 6, 8),
}
"""Bits that a weight of each format can run at."""

REFINED_FORMATS = ("autofp6", "autofp8")
"""Formats that hold offsets."""

_OFFSET_BYTES = {"autofp6": 1, "autofp8": 2}
"""Bytes of offsets for each refined subgroup of a row."""

_ARRAY_FIELDS = (
  "codes",
  "group_scale",
  "tensor_scale",
  "refinement_mask",
  "offsets",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QTensor:
  """A matrix `[N, K]` as packed codes, scales and refinement offsets.

  Element (n, k) is `(q + delta) * group_scale[n, k // 16] * tensor_scale`,
  where q is the E2M1 (fp6g: E2M3) value of its code and delta comes from its
  offset if its subgroup is refined and the level asks for it.

  Invariant, checked by `validate_qtensor`: with Kp = K rounded up to a
  multiple of 16 and any leading axes L alike on every array,
    * codes are uint8 `[L, N, Kp / 2]`, the even element in the low nibble, bits
      `s e1 e0 m` (fp6g: `[L, N, 3 Kp / 4]`, four 6-bit codes in three bytes);
    * group_scale is float8_e4m3fn `[L, N, Kp / 16]`, finite and > 0;
    * tensor_scale is float32 `[L]`, finite and > 0;
    * refinement_mask is None, or uint8 `[L, ceil(Kp / 32)]`: bit i of a nibble
      marks subgroup i of a group, the even group in the low nibble, shared by
      all rows; an unused last nibble is 0;
    * offsets is None, or uint8 `[L, N, R]` (autofp8: `[L, N, 2 R]`) for the R
      marked subgroups in ascending order: a byte holds the 2-bit offsets of
      its four elements, element i in bits 2i and 2i + 1 (autofp8: two bytes
      hold four 4-bit offsets, low nibble first), two's complement;
    * mask and offsets are present for autofp6 and autofp8 and absent for the
      other formats;
    * codes of the padding, columns K to Kp, decode to 0.

  Attributes:
    codes: See above.
    group_scale: See above.
    tensor_scale: See above.
    refinement_mask: See above.
    offsets: See above.
    format: One of `LEVELS`.
    decoding: Step of the offsets.
    columns: K before padding.
  """

  codes: UInt8[Array, "*L N C"]
  group_scale: Float[Array, "*L N G"]
  tensor_scale: Float[Array, "*L"]
  refinement_mask: UInt8[Array, "*L B"] | None
  offsets: UInt8[Array, "*L N O"] | None
  format: Format = dataclasses.field(metadata={"static": True})
  decoding: autofp.Decoding = dataclasses.field(metadata={"static": True})
  columns: int = dataclasses.field(metadata={"static": True})

  @property
  def rows(self) -> int:
    """N."""
    return self.codes.shape[-2]

  @property
  def padded_columns(self) -> int:
    """Kp: K rounded up to a whole group."""
    return padded(self.columns)

  @property
  def refined(self) -> int:
    """R: refined subgroups of each row."""
    if self.offsets is None:
      return 0
    return self.offsets.shape[-1] // _OFFSET_BYTES[self.format]

  @property
  def levels(self) -> tuple[int, ...]:
    """Bits that the tensor can be decoded at, ascending."""
    return LEVELS[self.format]

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return sum(
      math.prod(leaf.shape) * leaf.dtype.itemsize
      for leaf in jax.tree.leaves(self)
    )

  @property
  def stored_bits(self) -> float:
    """Bits of all arrays for each element of the unpadded matrix."""
    matrices = math.prod(self.codes.shape[:-2])
    return 8 * self.nbytes / (matrices * self.rows * self.columns)

  def arrays(self) -> dict[str, np.ndarray]:
    """On the host and by field, without those that the format lacks."""
    fields = {name: getattr(self, name) for name in _ARRAY_FIELDS}
    return {
      name: np.asarray(array)
      for name, array in fields.items()
      if array is not None
    }

  def static(self) -> dict[str, Any]:
    """The fields that are no arrays; JSON can hold them."""
    return {
      "format": self.format,
      "decoding": self.decoding,
      "columns": self.columns,
    }

  @classmethod
  def rebuild(
    cls, arrays: Mapping[str, np.ndarray], static: Mapping[str, Any]
  ) -> "QTensor":
    """The tensor that `arrays` and `static` came from; checks nothing."""
    fields = dict.fromkeys(_ARRAY_FIELDS)
    # Unlike `jnp.asarray`, this compiles nothing for each new shape.
    fields |= {name: jax.device_put(array) for name, array in arrays.items()}
    return cls(**fields, **static)


def padded(columns: int) -> int:
  """`columns` rounded up to a multiple of 16."""
  return -(-columns // packing.GROUP) * packing.GROUP


def difference(a: QTensor, b: QTensor) -> str | None:
  """Why two tensors cannot be stacked or joined, as `columns: 64 and 128`.

  Their masks, outputs and scales may differ.

  Args:
    a: A tensor.
    b: Another.

  Returns:
    None where format, decoding and columns agree.
  """
  for name in ("format", "decoding", "columns"):
    if getattr(a, name) != getattr(b, name):
      return f"{name}: {getattr(a, name)!r} and {getattr(b, name)!r}"
  return None


def with_room(q: QTensor) -> QTensor:
  """The same matrix, with offsets of 0 beyond those of its marked subgroups.

  JAX compiles for shapes. Tensors of one size that refine different numbers of
  subgroups share a program where each has room for all that can be marked.

  Args:
    q: Any packed tensor.

  Returns:
    A tensor that decodes to the same values, whose `refined` is the most that
    a mask can mark; a traced one as it is.
  """
  if q.offsets is None or isinstance(q.offsets, Tracer):
    return q
  groups = q.padded_columns // packing.GROUP
  room = groups * packing.MAX_REFINED_PER_GROUP - q.refined
  widths = [(0, 0)] * (q.offsets.ndim - 1)
  widths.append((0, max(0, room) * _OFFSET_BYTES[q.format]))
  offsets = np.pad(np.asarray(q.offsets), widths)
  return dataclasses.replace(q, offsets=jax.device_put(offsets))


def validate_qtensor(q: QTensor) -> None:
  """Checks the invariant of `QTensor` on concrete arrays.

  Raises:
    QTensorError: Names the field, what it is and what it must be.
  """
  if q.format not in LEVELS:
    raise QTensorError(f"format {q.format!r} is not one of {sorted(LEVELS)}")
  if q.decoding not in ("fixed", "exponent"):
    raise QTensorError(f"decoding {q.decoding!r} is not fixed or exponent")
  if q.columns < 1 or q.codes.ndim < 2:
    raise QTensorError(f"{q.columns=} and {q.codes.ndim=} describe no matrix")
  kp, lead = q.padded_columns, tuple(q.codes.shape[:-2])
  codes = kp * 3 // 4 if q.format == "fp6g" else kp // 2
  groups = kp // packing.GROUP
  _check(q, "codes", (*lead, q.rows, codes), "uint8")
  _check(q, "group_scale", (*lead, q.rows, groups), "float8_e4m3fn")
  _check(q, "tensor_scale", lead, "float32")
  for name in ("group_scale", "tensor_scale"):
    values = np.asarray(getattr(q, name)).astype(np.float32)
    bad = int((~(np.isfinite(values) & (values > 0))).sum())
    if bad:
      raise QTensorError(f"{name} has {bad} values that are not finite and > 0")
  _check_padding(q)
  if q.format in REFINED_FORMATS:
    _check_refinement(q)
  elif q.refinement_mask is not None or q.offsets is not None:
    raise QTensorError(f"{q.format} holds no refinement_mask and no offsets")


def _check_padding(q):
  padding = q.padded_columns - q.columns
  if not padding:
    return
  width = 6 if q.format == "fp6g" else 4
  last = np.asarray(q.codes)[..., -packing.GROUP * width // 8 :]
  bits = np.unpackbits(last, axis=-1, bitorder="little")
  bits = bits.reshape(*last.shape[:-1], packing.GROUP, width)
  # The sign, the highest bit, may be set: -0 is 0.
  bad = int(bits[..., -padding:, :-1].any(axis=-1).sum())
  if bad:
    raise QTensorError(
      f"codes has {bad} values that are not 0 in the padding, columns"
      f" {q.columns} to {q.padded_columns - 1}"
    )


def _check_refinement(q):
  groups, lead = q.group_scale.shape[-1], tuple(q.codes.shape[:-2])
  if q.refinement_mask is None or q.offsets is None:
    raise QTensorError(f"{q.format} needs refinement_mask and offsets")
  _check(q, "refinement_mask", (*lead, -(-groups // 2)), "uint8")
  offsets = q.refined * _OFFSET_BYTES[q.format]
  _check(q, "offsets", (*lead, q.rows, offsets), "uint8")
  mask = np.asarray(q.refinement_mask)
  if groups % 2 and (mask[..., -1] >> 4).any():
    raise QTensorError(
      f"refinement_mask marks subgroups beyond its {groups} groups"
    )
  marked = np.bitwise_count(mask).sum(axis=-1)
  if (marked != q.refined).any():
    raise QTensorError(
      f"refinement_mask marks {np.unique(marked).tolist()} subgroups;"
      f" offsets hold {q.refined}"
    )


def _check(q, name, shape, dtype):
  array = getattr(q, name)
  if tuple(array.shape) != shape or array.dtype != dtype:
    raise QTensorError(
      f"{name} is {array.dtype}{list(array.shape)}; a {q.format} tensor of"
      f" {q.columns} columns needs {dtype}{list(shape)}"
    )


@jax.jit
def mask_bits(q: QTensor) -> Bool[Array, "*L S"]:
  """Refinement mask `[..., Kp / 4]`; all False without one."""
  subgroups = q.padded_columns // packing.SUBGROUP
  if q.refinement_mask is None:
    return jnp.zeros((*q.codes.shape[:-2], subgroups), bool)
  return packing.unpack_mask(q.refinement_mask, subgroups)


@jax.jit
def refined_columns(q: QTensor) -> Int[Array, "*L C"]:
  """Indices of the refined columns, ascending, `[..., 4 R]`."""
  mask = jnp.repeat(mask_bits(q), packing.SUBGROUP, axis=-1)
  # A stable sort of the flags lists the marked columns first, in order.
  order = jnp.argsort(~mask, axis=-1, stable=True)
  return order[..., : q.refined * packing.SUBGROUP].astype(jnp.int32)


@jax.jit
def decode_base(q: QTensor) -> Float[Array, "*L N Kp"]:
  """Element values of the base, without scales or refinement."""
  if q.format == "fp6g":
    return elements.decode_e2m3(packing.unpack_sextets(q.codes))
  return elements.decode_e2m1(packing.unpack_nibbles(q.codes))


@partial(jax.jit, static_argnames="level")
def decode_offsets(q: QTensor, level: int) -> Float[Array, "*L N C"]:
  """Refinement of the refined columns at a level, in units of the scale.

  Args:
    q: An autofp6 or autofp8 tensor.
    level: 6, or 8 for autofp8.

  Returns:
    `[..., N, 4 R]` in the order of `refined_columns`.

  Raises:
    QTensorError: The tensor holds no offsets of that level.
  """
  if q.offsets is None or level < 6 or level not in q.levels:
    raise QTensorError(f"a {q.format} tensor holds no offsets of {level} bits")
  columns = refined_columns(q)[..., None, :]
  base = jnp.take_along_axis(decode_base(q), columns, axis=-1)
  if q.format == "autofp6":
    raw = packing.unpack_pairs(q.offsets).astype(jnp.int32)
    return autofp.offset_delta(raw - ((raw & 2) << 1), base, q.decoding)
  raw = packing.unpack_nibbles(q.offsets).astype(jnp.int32)
  d = raw - ((raw & 8) << 1)
  if level == 8:
    return autofp.offset8_delta(d, base, q.decoding)
  return autofp.offset_delta(autofp.offset8_to_offset6(d), base, q.decoding)


def dequantize(q: QTensor, level: int | None = None) -> Float[Array, "*L N K"]:
  """The matrix at a level, in float32.

  Args:
    q: Any packed tensor.
    level: Bits; None takes the highest that the tensor holds.

  Returns:
    `[..., N, K]` without padding.

  Raises:
    QTensorError: The tensor does not hold the level.
  """
  level = q.levels[-1] if level is None else level
  if level not in q.levels:
    raise QTensorError(
      f"a {q.format} tensor has levels {q.levels}; {level} is not one"
    )
  return _dequantize(with_room(q), level)


@partial(jax.jit, static_argnames="level")
def _dequantize(q, level):
  values = decode_base(q)
  if level == 2:
    values = autofp.AUTOFP2_SCALE * autofp.autofp2_digit(values)
  if q.refined and level >= 6:
    values = values + _dense_delta(q, level)
  scale = elements.decode_e4m3(q.group_scale)
  values = values * jnp.repeat(scale, packing.GROUP, axis=-1)
  return (values * q.tensor_scale[..., None, None])[..., : q.columns]


def _dense_delta(q, level):
  """Refinement of every element `[..., N, Kp]`, 0 outside the mask.

  Each column looks up its own place among the refined ones: a gather, which
  is an order of magnitude faster on a CPU than the scatter it stands for.
  """
  mask = jnp.repeat(mask_bits(q), packing.SUBGROUP, axis=-1)[..., None, :]
  place = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
  delta = jnp.take_along_axis(decode_offsets(q, level), place, axis=-1)
  return jnp.where(mask, delta, 0.0)
