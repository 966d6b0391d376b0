"""The paper's own form, literally: one GEMM over concatenated operands.

Every operand below is an E2M1 value with an E4M3 group scale, exactly what a
block-scaled tensor core takes. The length along K is

  [ Wq | Wqr of 6 bits | two limbs of 8 bits | 2-bit correction ]

and each row puts zeros where a segment is not its own (paper sections 4.1 and
4.2, appendices D.4 and D.5).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from autoematic_jax import formats
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows


def extended_gemm(
  rows: QuantizedRows, weight: formats.QTensor
) -> Float[Array, "M N"]:
  """Rows at mixed levels against one packed weight.

  Args:
    rows: Quantized activations.
    weight: Packed weight of the same width.

  Returns:
    `[M, N]` float32, accumulated in float32.
  """
  w = jnp.concatenate(weight_segments(rows, weight), axis=1)
  a = jnp.concatenate(activation_segments(rows, weight), axis=1)
  # One dot a row: its order of summation cannot depend on other rows.
  out = lax.map(lambda row: jnp.dot(w, row, precision=lax.Precision.HIGHEST), a)
  return out * rows.tensor_scale * weight.tensor_scale


def weight_segments(
  rows: QuantizedRows, weight: formats.QTensor
) -> list[Float[Array, "N Kp"]]:
  """`[Wq | Wqr ...]`, scaled; Wqr is built for the union of the rows' masks."""
  base = formats.decode_base(weight)
  scale = jnp.repeat(
    formats.decode_e4m3(weight.group_scale), formats.GROUP, axis=1
  )
  segments = [base * scale]
  for level, divisor, delta in _limbs(weight):
    union = jnp.any(rows.mask & (rows.levels == level)[:, None], axis=0)
    union = jnp.repeat(union, formats.SUBGROUP)[None]
    mask = _weight_columns(weight)[None]
    refined = jnp.where(mask, delta, jnp.where(union, base, 0.0))
    segments.append(refined * (scale / divisor))
  if 2 in weight.levels:
    correction = 2.0 * formats.autofp2_digit(base) - base
    segments.append(correction * scale)
  return segments


def activation_segments(
  rows: QuantizedRows, weight: formats.QTensor
) -> list[Float[Array, "M Kp"]]:
  """`[Aq | Aqr ...]`, scaled, zero where a segment is not the row's own."""
  segments = [rows.scaled(rows.values)]
  element_mask = jnp.repeat(rows.mask, formats.SUBGROUP, axis=1)
  for level, divisor, _ in _limbs(weight):
    own = (rows.levels == level)[:, None]
    delta = _activation_limb(rows, weight, level, divisor)
    refined = jnp.where(
      _weight_columns(weight)[None],
      rows.values,
      jnp.where(element_mask, delta, 0.0),
    )
    segments.append(rows.scaled(jnp.where(own, refined, 0.0)))
  if 2 in weight.levels:
    own = (rows.levels == 2)[:, None]
    segments.append(rows.scaled(jnp.where(own, rows.values, 0.0)))
  return segments


def _weight_columns(weight):
  """Which columns the weight refines, `[Kp]`."""
  if weight.refinement_mask is None:
    return jnp.zeros((weight.padded_columns,), bool)
  return jnp.repeat(formats.mask_bits(weight), formats.SUBGROUP)


def _limbs(weight):
  """`(level, divisor of the scale, E2M1 values [N, Kp])` of each segment."""
  base = formats.decode_base(weight)
  if 6 in weight.levels and weight.format != "fp6g":
    yield 6, 4.0, 4.0 * _dense_delta(weight, 6)
  if 8 in weight.levels:
    high, low = _split(_dense_delta(weight, 8), base, weight.decoding)
    yield 8, 4.0, high
    yield 8, 16.0, low


def _dense_delta(weight, level):
  """Refinement of the weight scattered to `[N, Kp]`."""
  delta = jnp.zeros((weight.rows, weight.padded_columns), jnp.float32)
  if weight.offsets is None:
    return delta
  columns = formats.refined_columns(weight)
  return delta.at[:, columns].set(formats.decode_offsets(weight, level))


def _split(delta, base, decoding):
  """Splits an 8-bit refinement into its two E2M1 limbs, at s/4 and s/16."""
  step = formats.offset8_delta(jnp.ones(base.shape, jnp.int8), base, decoding)
  high, low = formats.split_offset8(jnp.round(delta / step).astype(jnp.int8))
  # d = 4 * high + low steps; 4 * (4 * step) and 16 * step undo the scales.
  return high * step * 16.0, low * step * 16.0


def _activation_limb(rows, weight, level, divisor):
  if level == 6:
    return 4.0 * rows.delta
  high, low = _split(rows.delta, rows.values, weight.decoding)
  return high if divisor == 4.0 else low
