"""One group of 16 columns: which scales it may have, how its columns round."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int8

from autoematic_jax import formats
from autoematic_jax.arithmetic import exact_divide

SCALE_TARGETS = (1.0, *(t / 24 for t in range(16, 29) if t != 24))
"""What a group's largest magnitude may be mapped to, 1 first: E2M1's 6, and
from 4 to 7 by quarters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqOptions:
  """How weights are chosen.

  Attributes:
    format: Format of the projections.
    rho: Share of the subgroups that are refined.
    decoding: Step of the offsets.
    damping: Share of the Hessian's mean diagonal that is added to it.
    scale_targets: What the largest magnitude of a group is mapped to: the
      candidate of least weighted error is taken. In units of the format's
      largest element; the paper has 1 alone.
    sweeps: How often all groups are chosen again at the end, each with the
      others as they are (`descent`); the paper has 0.
  """

  format: formats.Format = "autofp6"
  rho: float = 0.2
  decoding: formats.Decoding = "exponent"
  damping: float = 0.01
  scale_targets: tuple[float, ...] = SCALE_TARGETS
  sweeps: int = 2

  @property
  def refined(self) -> bool:
    """Whether the format has offsets."""
    return self.format in formats.REFINED_FORMATS


def block_inverses(
  square: Float[np.ndarray, "Kp Kp"],
) -> Float[np.ndarray, "G 16 16"]:
  """Inverses of the diagonal blocks of a matrix, float64."""
  size = formats.GROUP
  starts = range(0, len(square), size)
  blocks = np.stack([square[s : s + size, s : s + size] for s in starts])
  return np.linalg.inv(blocks.astype(np.float64))


class Rounded(NamedTuple):
  """Columns as they are stored.

  Attributes:
    values: Elements of the base.
    d: Offsets, 0 where there is none.
    weights: What both decode to.
  """

  values: Float[Array, "N C"]
  d: Int8[Array, "N C"]
  weights: Float[Array, "N C"]


def candidate_scale(
  block: Float[Array, "N 16"],
  tensor_scale: Float[Array, "N 1"],
  target: Float[Array, ""],
  options: GptqOptions,
) -> Float[Array, "N 1"]:
  """Stored scale that maps the largest magnitude of a row to a target."""
  largest = formats.largest_element(options.format)
  return formats.group_scale(
    block, tensor_scale, largest * target, formats.SMALLEST_WEIGHT_SCALE
  )


def rounding_errors(
  block: Float[Array, "N 16"],
  unit: Float[Array, "N 1"],
  options: GptqOptions,
) -> tuple[Float[Array, "N 16"], Float[Array, "N 16"]]:
  """What rounding leaves of a block, in units: without and with offsets."""
  scaled = exact_divide(block, unit)
  values = formats.round_element(scaled, options.format)
  base = scaled - values
  if not options.refined:
    return base, base
  _, delta = formats.refine_element(
    scaled, values, options.format, options.decoding
  )
  return base, base - delta


def round_columns(
  block: Float[Array, "N 16"],
  unit: Float[Array, "N 1"],
  upper: Float[Array, "16 16"],
  mask: Bool[Array, "4"],
  options: GptqOptions,
) -> tuple[Rounded, Float[Array, "N 16"]]:
  """Rounds a group column by column, each making good those before it.

  Args:
    block: Weights.
    unit: Scale of an element of each row.
    upper: Factor of the inverse Hessian, `upper.T @ upper`, in this group.
    mask: Refined subgroups.
    options: Format.

  Returns:
    The columns, and the error of each divided by its diagonal in `upper`.
  """
  refined = jnp.repeat(mask, formats.SUBGROUP)

  def column(block, k):
    given = lax.dynamic_index_in_dim(block, k, 1)
    scaled = exact_divide(given, unit)
    value = formats.round_element(scaled, options.format)
    d, delta = jnp.zeros(value.shape, jnp.int8), jnp.zeros_like(value)
    if options.refined:
      d, delta = formats.refine_element(
        scaled, value, options.format, options.decoding
      )
      d = jnp.where(refined[k], d, 0).astype(jnp.int8)
      delta = jnp.where(refined[k], delta, 0.0)
    weight = (value + delta) * unit
    error = (given - weight) / upper[k, k]
    after = jnp.arange(formats.GROUP) > k
    block = block - jnp.where(after, error * upper[k], 0.0)
    return block, (value[:, 0], d[:, 0], weight[:, 0], error[:, 0])

  _, outcome = lax.scan(column, block, jnp.arange(formats.GROUP))
  values, d, weights, errors = (array.T for array in outcome)
  return Rounded(values, d, weights), errors
