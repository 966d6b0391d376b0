"""GPTQ that knows which subgroups are refined (paper, Algorithm 1).

Groups of 16 columns are quantized in order; what a group's rounding changes in
the layer's output is made good by the columns after it.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import formats
from autoematic_jax.calibration import descent
from autoematic_jax.calibration import groups
from autoematic_jax.calibration.groups import GptqOptions
from autoematic_jax.calibration.hessian import Factor


def quantize_jointly(
  weights: Sequence[Float[Array | np.ndarray, "_ K"]],
  factor: Factor,
  options: GptqOptions,
  refined: int | None = None,
  loss: Float[np.ndarray, "S"] | None = None,
) -> list[formats.QTensor]:
  """Quantizes matrices that read the same input.

  Args:
    weights: Matrices of one width; they share the refinement mask and keep
      their own tensor scales.
    factor: Of the inputs' Hessian, of that width.
    options: Format and search.
    refined: Subgroups to refine; None takes the share `options.rho`.
    loss: What refining each subgroup costs elsewhere, in squared error of the
      outputs; None is nothing.

  Returns:
    One packed tensor for each matrix.
  """
  columns = weights[0].shape[1]
  if loss is None:
    loss = np.zeros(-(-columns // formats.GROUP) * formats.SUBGROUPS_PER_GROUP)
  counts = _refined_per_group(weights, factor, options, refined, loss)
  stacked = jnp.concatenate([jnp.asarray(w, jnp.float32) for w in weights])
  largest = formats.largest_element(options.format)
  scales = [formats.tensor_scale(jnp.asarray(w), largest) for w in weights]
  rows = [w.shape[0] for w in weights]
  tensor_scale = jnp.concatenate(
    [jnp.full((n, 1), s) for n, s in zip(rows, scales, strict=True)]
  )
  padding = counts.size * formats.GROUP - columns
  stacked = jnp.pad(stacked, ((0, 0), (0, padding)))
  upper = _padded(factor.upper, padding)
  choice, masks = _run(
    stacked,
    tensor_scale,
    jnp.asarray(upper),
    jnp.asarray(groups.block_inverses(upper), jnp.float32),
    jnp.asarray(counts, jnp.int32),
    jnp.asarray(loss.reshape(-1, formats.SUBGROUPS_PER_GROUP), jnp.float32),
    options=options,
  )
  if options.sweeps:
    hessian = _padded(factor.damped, padding)
    choice = descent.improve(
      stacked,
      choice,
      tensor_scale,
      jnp.asarray(hessian),
      descent.blocks_of(hessian),
      masks,
      options=options,
    )
  ends = np.cumsum(rows)[:-1]
  parts = [
    jnp.split(array, ends)
    for array in (choice.rounded.values, choice.scale, choice.rounded.d)
  ]
  return [
    formats.assemble_qtensor(
      part_values,
      part_scale,
      scale,
      format=options.format,
      decoding=options.decoding,
      columns=columns,
      refinement_mask=np.asarray(masks).ravel() if options.refined else None,
      offsets=offsets if options.refined else None,
    )
    for part_values, part_scale, offsets, scale in zip(
      *parts, scales, strict=True
    )
  ]


def _padded(square, padding):
  """A matrix continued by the identity."""
  size = len(square)
  out = np.pad(square, ((0, padding), (0, padding)))
  out[range(size, len(out)), range(size, len(out))] = 1.0
  return out


def _refined_per_group(
  weights, factor, options, refined, loss
) -> Int[np.ndarray, "G"]:
  """Step 1: how many subgroups of each group are refined."""
  if not options.refined:
    return np.zeros(-(-weights[0].shape[1] // formats.GROUP), np.int32)
  gain = sum(
    formats.refinement_gain(
      w,
      format=options.format,
      decoding=options.decoding,
      importance=factor.diagonal,
    )
    for w in weights
  )
  if refined is None:
    refined = formats.refinement_budget(weights[0].shape[1], options.rho)
  mask = formats.select_refinement_mask(gain - loss, refined)
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


@partial(jax.jit, static_argnames="options")
def _run(w, tensor_scale, upper, inverses, counts, losses, *, options):
  """Steps 2 and 3 over all groups; `w` is `[N, Kp]`, padded."""
  width = w.shape[1]

  def step(w, inputs):
    index, inverse, count, loss = inputs
    start = index * formats.GROUP
    block = lax.dynamic_slice_in_dim(w, start, formats.GROUP, 1)
    u_rows = lax.dynamic_slice_in_dim(upper, start, formats.GROUP, 0)
    u = lax.dynamic_slice_in_dim(u_rows, start, formats.GROUP, 1)
    mask = jnp.zeros((formats.SUBGROUPS_PER_GROUP,), bool)
    scale = _choose_scale(block, tensor_scale, u, mask, options)
    if options.refined:
      unit = scale * tensor_scale
      mask = _choose_mask(block, unit, inverse, count, loss, options)
      scale = _choose_scale(block, tensor_scale, u, mask, options)
    rounded, errors = groups.round_columns(
      block, scale * tensor_scale, u, mask, options
    )
    later = jnp.arange(width) >= start + formats.GROUP
    change = jnp.matmul(errors, u_rows, precision=lax.Precision.HIGHEST)
    return w - jnp.where(later, change, 0.0), (rounded, scale[:, 0], mask)

  indices = jnp.arange(width // formats.GROUP)
  _, (rounded, scale, masks) = lax.scan(
    step, w, (indices, inverses, counts, losses)
  )
  rounded = jax.tree.map(
    lambda x: x.swapaxes(0, 1).reshape(w.shape[0], width), rounded
  )
  return descent.Choice(rounded, scale.T), masks


def _choose_scale(block, tensor_scale, u, mask, options) -> Float[Array, "N 1"]:
  """The candidate scale of each row with the least weighted error."""
  weight = 1.0 / jnp.square(jnp.diagonal(u))
  refined = jnp.repeat(mask, formats.SUBGROUP)

  def candidate(target):
    scale = groups.candidate_scale(block, tensor_scale, target, options)
    base, finer = groups.rounding_errors(block, scale * tensor_scale, options)
    error = jnp.square(jnp.where(refined, finer, base) * scale)
    return jnp.sum(error * weight, axis=1), scale[:, 0]

  targets = jnp.asarray(options.scale_targets, jnp.float32)
  errors, scales = lax.map(candidate, targets)
  best = jnp.argmin(errors, axis=0, keepdims=True)
  return jnp.take_along_axis(scales, best, axis=0).T


def _choose_mask(block, unit, inverse, count, loss, options):
  """The set of `count` subgroups that leaves the least error, for all rows.

  `loss` is added for each subgroup that is in the set.
  """
  base, refined = groups.rounding_errors(block, unit, options)
  sets = jnp.asarray(_SETS)

  def total(flags):
    error = jnp.where(jnp.repeat(flags, formats.SUBGROUP), refined, base)
    error = jnp.matmul(error * unit, inverse, precision=lax.Precision.HIGHEST)
    return jnp.sum(jnp.square(error)) + jnp.sum(jnp.where(flags, loss, 0.0))

  losses = lax.map(total, sets)
  losses = jnp.where(sets.sum(1) == count, losses, jnp.inf)
  return sets[jnp.argmin(losses)]
