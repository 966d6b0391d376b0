"""GPTQ that knows which subgroups are refined (paper, Algorithm 1).

Groups of 16 columns are quantized in order; what a group's rounding changes in
the layer's output is made good by the columns after it.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import formats
from autoematic_jax.arithmetic import exact_divide
from autoematic_jax.calibration.hessian import Factor

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
  """

  format: formats.Format = "autofp6"
  rho: float = 0.2
  decoding: formats.Decoding = "exponent"
  damping: float = 0.01
  scale_targets: tuple[float, ...] = SCALE_TARGETS

  @property
  def refined(self) -> bool:
    """Whether the format has offsets."""
    return self.format in formats.REFINED_FORMATS


def quantize_jointly(
  weights: Sequence[Float[Array | np.ndarray, "_ K"]],
  factor: Factor,
  options: GptqOptions,
) -> list[formats.QTensor]:
  """Quantizes matrices that read the same input.

  Args:
    weights: Matrices of one width; they share the refinement mask and keep
      their own tensor scales.
    factor: Of the inputs' Hessian, of that width.
    options: Format and search.

  Returns:
    One packed tensor for each matrix.
  """
  columns = weights[0].shape[1]
  counts = _refined_per_group(weights, factor, options)
  stacked = jnp.concatenate([jnp.asarray(w, jnp.float32) for w in weights])
  largest = formats.largest_element(options.format)
  scales = [formats.tensor_scale(jnp.asarray(w), largest) for w in weights]
  rows = [w.shape[0] for w in weights]
  tensor_scale = jnp.concatenate(
    [jnp.full((n, 1), s) for n, s in zip(rows, scales, strict=True)]
  )
  padding = counts.size * formats.GROUP - columns
  upper = np.pad(factor.upper, ((0, padding), (0, padding)))
  upper[range(columns, len(upper)), range(columns, len(upper))] = 1.0
  values, group_scale, d, mask = _run(
    jnp.pad(stacked, ((0, 0), (0, padding))),
    tensor_scale,
    jnp.asarray(upper),
    jnp.asarray(_block_inverses(upper)),
    jnp.asarray(counts, jnp.int32),
    options=options,
  )
  ends = np.cumsum(rows)[:-1]
  parts = [jnp.split(array, ends) for array in (values, group_scale, d)]
  return [
    formats.assemble_qtensor(
      part_values,
      part_scale,
      scale,
      format=options.format,
      decoding=options.decoding,
      columns=columns,
      refinement_mask=np.asarray(mask).ravel() if options.refined else None,
      offsets=offsets if options.refined else None,
    )
    for part_values, part_scale, offsets, scale in zip(
      *parts, scales, strict=True
    )
  ]


def _refined_per_group(weights, factor, options) -> Int[np.ndarray, "G"]:
  """Step 1: how many subgroups of each group are refined."""
  mask = formats.shared_refinement_mask(
    weights,
    format=options.format,
    rho=options.rho,
    decoding=options.decoding,
    importance=factor.diagonal,
  )
  if mask is None:
    return np.zeros(-(-weights[0].shape[1] // formats.GROUP), np.int32)
  return mask.reshape(-1, formats.SUBGROUPS_PER_GROUP).sum(1)


# Every set of subgroups that may be refined in a group, and its size.
_SETS = np.array(
  [
    flags
    for flags in itertools.product(
      (False, True), repeat=formats.SUBGROUPS_PER_GROUP
    )
    if sum(flags) <= formats.MAX_REFINED_PER_GROUP
  ]
)


def _block_inverses(upper):
  """Inverses of the diagonal blocks of 16, `[G, 16, 16]`."""
  size = formats.GROUP
  starts = range(0, len(upper), size)
  blocks = np.stack([upper[s : s + size, s : s + size] for s in starts])
  return np.linalg.inv(blocks.astype(np.float64)).astype(np.float32)


@partial(jax.jit, static_argnames="options")
def _run(w, tensor_scale, upper, inverses, counts, *, options):
  """Steps 2 and 3 over all groups; `w` is `[N, Kp]`, padded."""
  width = w.shape[1]

  def step(w, inputs):
    index, inverse, count = inputs
    start = index * formats.GROUP
    block = lax.dynamic_slice_in_dim(w, start, formats.GROUP, 1)
    u_rows = lax.dynamic_slice_in_dim(upper, start, formats.GROUP, 0)
    u = lax.dynamic_slice_in_dim(u_rows, start, formats.GROUP, 1)
    mask = jnp.zeros((formats.SUBGROUPS_PER_GROUP,), bool)
    scale = _choose_scale(block, tensor_scale, u, mask, options)
    if options.refined:
      mask = _choose_mask(block, scale * tensor_scale, inverse, count, options)
      scale = _choose_scale(block, tensor_scale, u, mask, options)
    unit = scale * tensor_scale
    values, d, errors = _quantize_columns(block, unit, u, mask, options)
    later = jnp.arange(width) >= start + formats.GROUP
    change = jnp.matmul(errors, u_rows, precision=lax.Precision.HIGHEST)
    return w - jnp.where(later, change, 0.0), (values, scale[:, 0], d, mask)

  groups = jnp.arange(width // formats.GROUP)
  _, (values, scale, d, mask) = lax.scan(step, w, (groups, inverses, counts))
  rows = w.shape[0]
  values = values.swapaxes(0, 1).reshape(rows, width)
  return values, scale.T, d.swapaxes(0, 1).reshape(rows, width), mask


def _choose_scale(block, tensor_scale, u, mask, options) -> Float[Array, "N 1"]:
  """The candidate scale of each row with the least weighted error."""
  weight = 1.0 / jnp.square(jnp.diagonal(u))
  refined = jnp.repeat(mask, formats.SUBGROUP)
  largest = formats.largest_element(options.format)

  def candidate(target):
    scale = formats.group_scale(
      block, tensor_scale, largest * target, formats.SMALLEST_WEIGHT_SCALE
    )
    base, finer = _rounding_errors(block, scale * tensor_scale, options)
    error = jnp.square(jnp.where(refined, finer, base) * scale)
    return jnp.sum(error * weight, axis=1), scale[:, 0]

  targets = jnp.asarray(options.scale_targets, jnp.float32)
  errors, scales = lax.map(candidate, targets)
  best = jnp.argmin(errors, axis=0, keepdims=True)
  return jnp.take_along_axis(scales, best, axis=0).T


def _rounding_errors(block, unit, options):
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


def _choose_mask(block, unit, inverse, count, options):
  """The set of `count` subgroups that leaves the least error, for all rows."""
  base, refined = _rounding_errors(block, unit, options)
  sets = jnp.asarray(_SETS)

  def loss(flags):
    error = jnp.where(jnp.repeat(flags, formats.SUBGROUP), refined, base)
    error = jnp.matmul(error * unit, inverse, precision=lax.Precision.HIGHEST)
    return jnp.sum(jnp.square(error))

  losses = lax.map(loss, sets)
  losses = jnp.where(sets.sum(1) == count, losses, jnp.inf)
  return sets[jnp.argmin(losses)]


def _quantize_columns(block, unit, u, mask, options):
  """Rounds a group column by column, each making good those before it."""
  columns = jnp.repeat(mask, formats.SUBGROUP)

  def column(block, k):
    given = lax.dynamic_index_in_dim(block, k, 1)
    scaled = exact_divide(given, unit)
    value = formats.round_element(scaled, options.format)
    d, delta = jnp.zeros(value.shape, jnp.int8), jnp.zeros_like(value)
    if options.refined:
      d, delta = formats.refine_element(
        scaled, value, options.format, options.decoding
      )
      d = jnp.where(columns[k], d, 0).astype(jnp.int8)
      delta = jnp.where(columns[k], delta, 0.0)
    error = (given - (value + delta) * unit) / u[k, k]
    after = jnp.arange(formats.GROUP) > k
    block = block - jnp.where(after, error * u[k], 0.0)
    return block, (value[:, 0], d[:, 0], error[:, 0])

  _, outcome = lax.scan(column, block, jnp.arange(formats.GROUP))
  return (array.T for array in outcome)
