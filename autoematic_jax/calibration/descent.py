"""Choosing each group again, with all others as they are.

GPTQ fixes a group once, before it knows how those after it round. Block
coordinate descent on the same quadratic loss goes over the groups again: each
gets the scale and elements that are best next to what the others have become.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from autoematic_jax import formats
from autoematic_jax.calibration import groups
from autoematic_jax.calibration.groups import GptqOptions
from autoematic_jax.calibration.groups import Rounded


class Choice(NamedTuple):
  """A whole matrix as it is stored.

  Attributes:
    rounded: All columns.
    scale: Stored scale of each group.
  """

  rounded: Rounded
  scale: Float[Array, "N G"]


class Blocks(NamedTuple):
  """The Hessian by groups.

  Attributes:
    inverses: Inverse of each diagonal block of the Hessian.
    uppers: Upper factor of each inverse.
  """

  inverses: Float[np.ndarray, "G 16 16"]
  uppers: Float[np.ndarray, "G 16 16"]


def blocks_of(hessian: Float[np.ndarray, "Kp Kp"]) -> Blocks:
  """Factors of the diagonal blocks of a positive definite Hessian."""
  inverses = groups.block_inverses(hessian)
  uppers = np.linalg.cholesky(inverses).swapaxes(1, 2)
  return Blocks(inverses.astype(np.float32), uppers.astype(np.float32))


@partial(jax.jit, static_argnames="options")
def improve(
  w: Float[Array, "N Kp"],
  choice: Choice,
  tensor_scale: Float[Array, "N 1"],
  hessian: Float[Array, "Kp Kp"],
  blocks: Blocks,
  masks: Bool[Array, "G 4"],
  options: GptqOptions,
) -> Choice:
  """Goes `options.sweeps` times over all groups.

  Args:
    w: What the weights should be.
    choice: What they are.
    tensor_scale: Of each row.
    hessian: H of the loss `(w - q) H (w - q)^T` of each row.
    blocks: Of `hessian`.
    masks: Refined subgroups of each group, which stay.
    options: Format and scales to try.

  Returns:
    A choice of no greater loss, row by row, up to rounding.
  """
  targets = jnp.asarray(options.scale_targets, jnp.float32)

  def step(choice, index):
    start = index * formats.GROUP
    rows = lax.dynamic_slice_in_dim(hessian, start, formats.GROUP, 0)
    square = lax.dynamic_slice_in_dim(rows, start, formats.GROUP, 1)
    now = _group(choice, index)
    slope = _dot(w - choice.rounded.weights, rows.T)
    # The weights that would be best here if any were allowed.
    wanted = now.rounded.weights + _dot(slope, blocks.inverses[index])

    def tried(target):
      scale = groups.candidate_scale(wanted, tensor_scale, target, options)
      return rounded_with(scale)

    def rounded_with(scale):
      rounded, _ = groups.round_columns(
        wanted,
        scale * tensor_scale,
        jnp.asarray(blocks.uppers)[index],
        masks[index],
        options,
      )
      return Choice(rounded, scale)

    def loss(group):
      error = group.rounded.weights - wanted
      return jnp.sum(_dot(error, square) * error, axis=1)

    candidates = jax.tree.map(
      lambda kept, same, new: jnp.concatenate([kept[None], same[None], new]),
      now,
      rounded_with(now.scale),
      jax.vmap(tried)(targets),
    )
    losses = jax.vmap(loss)(candidates)
    best = jnp.argmin(losses, axis=0)[None, :, None]
    picked = jax.tree.map(
      lambda x: jnp.take_along_axis(x, best, axis=0)[0], candidates
    )
    return _with_group(choice, index, picked), None

  count = w.shape[1] // formats.GROUP
  order = jnp.tile(jnp.arange(count), options.sweeps)
  return lax.scan(step, choice, order)[0]


def _dot(x, y):
  return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _group(choice, index) -> Choice:
  start = index * formats.GROUP
  return Choice(
    jax.tree.map(
      lambda x: lax.dynamic_slice_in_dim(x, start, formats.GROUP, 1),
      choice.rounded,
    ),
    lax.dynamic_slice_in_dim(choice.scale, index, 1, 1),
  )


def _with_group(choice, index, group) -> Choice:
  start = index * formats.GROUP
  return Choice(
    jax.tree.map(
      lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 1),
      choice.rounded,
      group.rounded,
    ),
    lax.dynamic_update_slice_in_dim(choice.scale, group.scale, index, 1),
  )
