"""Activation rows at the level that each row asks for."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax import formats
from autoematic_jax.arithmetic import exact_divide
from autoematic_jax.arithmetic import ordered_sum
from autoematic_jax.errors import PrecisionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig:
  """How activations are refined at run time.

  Attributes:
    threshold: A subgroup is refined when its squared error exceeds this share
      of its squared norm (paper appendix D: 0.003).
    decoding: Step of the offsets; must be that of the weights.
    overlapping: Whether subgroups that the weight refines may be refined in
      the activations too. The paper keeps them apart, which its extended-K
      form needs; a GEMM that decodes weights before it multiplies, as on
      CPUs, does not.
    nearest_base: Whether a refined element keeps its nearest base, as in the
      paper, or takes the base from which its offset comes nearest. Rows at
      6 bits only.
  """

  threshold: float = 0.0005
  decoding: formats.Decoding = "exponent"
  overlapping: bool = True
  nearest_base: bool = False

  def __post_init__(self):
    if not 0 <= self.threshold < 1:
      raise PrecisionError(f"{self.threshold=} must be in [0, 1)")
    if self.decoding not in ("fixed", "exponent"):
      raise PrecisionError(f"{self.decoding=} must be 'fixed' or 'exponent'")


PAPER = ActivationConfig(threshold=0.003, overlapping=False, nearest_base=True)
"""How the paper refines activations."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedRows:
  """Quantized activation rows; the value is `(values + delta) * scale`.

  The scale of element k of row m is
  `group_scale[m, k // 16] * tensor_scale[m]`.

  Attributes:
    values: `[M, Kp]` float32, E2M1 values (E2M3 for fp6g).
    delta: `[M, Kp]` float32 refinement; exactly 0 outside `mask` and in rows
      below 6 bits.
    mask: `[M, Kp / 4]` refined subgroups, disjoint from the weights' mask
      unless they may overlap.
    group_scale: `[M, Kp / 16]` float32, decoded E4M3.
    tensor_scale: `[M, 1]` float32; NaN where the row holds NaN or Inf.
    levels: `[M]` int32 bits of each row.
  """

  values: Float[Array, "M Kp"]
  delta: Float[Array, "M Kp"]
  mask: Bool[Array, "M S"]
  group_scale: Float[Array, "M G"]
  tensor_scale: Float[Array, "M 1"]
  levels: Int[Array, "M"]

  def scaled(self, values: Float[Array, "M Kp"]) -> Float[Array, "M Kp"]:
    """`values` times their group scale, without the row's tensor scale."""
    return values * jnp.repeat(self.group_scale, formats.GROUP, axis=1)


def pad_columns(x: Float[Array, "M K"], columns: int) -> Float[Array, "M Kp"]:
  """Zero-pads the last axis to `columns`."""
  return jnp.pad(x, ((0, 0), (0, columns - x.shape[1])))


def quantize_rows(
  x: Float[Array, "M K"],
  levels: Int[Array, "M"],
  *,
  weight_mask: Bool[Array, "S"] | None = None,
  config: ActivationConfig = ActivationConfig(),
  element: str = "e2m1",
  present: Sequence[int] = (2, 4, 6, 8),
) -> QuantizedRows:
  """Quantizes each row by itself (paper sections 3.2 and 4.1).

  A row depends on nothing but its own elements, its level and the weights'
  mask, so its bits do not change with its neighbours.

  Args:
    x: Activations; K is zero-padded to a multiple of 16.
    levels: Bits of each row; 2 quantizes activations as 4.
    weight_mask: `[Kp / 4]` subgroups refined in the weights, which the
      activations leave alone unless the config lets them overlap; None
      refines anywhere.
    config: Threshold, step and overlap.
    element: `e2m1` (NVFP4, AutoFP) or `e2m3` (FP6g, never refined).
    present: Levels that can occur in `levels`; the others cost nothing.

  Returns:
    The quantized rows.

  Raises:
    PrecisionError: `element` is unknown.
  """
  if element not in ("e2m1", "e2m3"):
    raise PrecisionError(f"{element=} must be 'e2m1' or 'e2m3'")
  rows, columns = x.shape
  padded = -(-columns // formats.GROUP) * formats.GROUP
  x = pad_columns(x.astype(jnp.float32), padded)
  max_element = 6.0 if element == "e2m1" else 7.5
  tensor_scale = formats.row_tensor_scale(x, max_element)
  group_scale = formats.group_scale(x, tensor_scale, max_element)
  scale = jnp.repeat(group_scale, formats.GROUP, axis=1) * tensor_scale
  scaled = exact_divide(x, scale)
  round_element = (
    formats.round_e2m1 if element == "e2m1" else formats.round_e2m3
  )
  values = round_element(scaled)
  mask = jnp.zeros((rows, padded // formats.SUBGROUP), bool)
  delta = jnp.zeros_like(values)
  if element == "e2m1" and any(level >= 6 for level in present):
    mask = _refinement_mask(scaled, values, levels, weight_mask, config)
    base, delta = _refinement(scaled, values, levels, config, present)
    refined = jnp.repeat(mask, formats.SUBGROUP, axis=1)
    values = jnp.where(refined, base, values)
    delta = jnp.where(refined, delta, 0.0)
  return QuantizedRows(
    values=values,
    delta=delta,
    mask=mask,
    group_scale=group_scale,
    tensor_scale=tensor_scale,
    levels=levels,
  )


def _refinement_mask(scaled, values, levels, weight_mask, config):
  """Subgroups whose relative squared error exceeds the threshold."""
  rows = scaled.shape[0]
  subgroups = (rows, -1, formats.SUBGROUP)
  error = ordered_sum(jnp.square(scaled - values).reshape(subgroups))
  norm = ordered_sum(jnp.square(scaled).reshape(subgroups))
  mask = (error > config.threshold * norm) & (levels >= 6)[:, None]
  if weight_mask is not None and not config.overlapping:
    mask &= ~weight_mask[None]
  return mask


def _refinement(scaled, values, levels, config, present):
  """Base and refinement of every element at its row's level."""
  base, delta = values, jnp.zeros_like(values)
  if 6 in present:
    base, delta = formats.refine_to_6(
      scaled, values, config.decoding, nearest_base=config.nearest_base
    )
  if 8 in present:
    offset = formats.offset8(scaled, values, config.decoding)
    delta8 = formats.offset8_delta(offset, values, config.decoding)
    at8 = (levels == 8)[:, None]
    base = jnp.where(at8, values, base)
    delta = jnp.where(at8, delta8, delta)
  return base, delta
