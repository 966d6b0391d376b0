"""Which share of the refined subgroups each input of each layer gets."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from autoematic_jax import formats

Key = TypeVar("Key", bound=Hashable)


class Candidates(NamedTuple):
  """The subgroups of one input.

  Attributes:
    gain: `[S]` what refining each subgroup saves, in a unit that all inputs
      share.
    rows: Outputs that read it: bytes of offsets that a subgroup costs.
  """

  gain: Float[np.ndarray, "S"]
  rows: int


def candidates(
  weights: Sequence[Float[np.ndarray, "_ K"]],
  *,
  gradients: Float[np.ndarray, "N"],
  inputs: Float[np.ndarray, "K"],
  activation_gain: Float[np.ndarray, "K"] | None,
  format: formats.Format,
  decoding: formats.Decoding,
) -> Candidates:
  """What refining the subgroups of an input saves, in nats of KL divergence.

  Args:
    weights: Matrices that read the input.
    gradients: Mean square of the gradient by each of their outputs.
    inputs: Mean square of each column of the input.
    activation_gain: Mean squared error of each column that refining the
      activations removes, where a subgroup that the weights refine loses that;
      else None.
    format: `autofp6` or `autofp8`.
    decoding: Step of the offsets.
  """
  ends = np.cumsum([len(w) for w in weights])[:-1]
  gain = 0.0
  for w, squares in zip(weights, np.split(gradients, ends), strict=True):
    saved = formats.refinement_gain(
      w, format=format, decoding=decoding, importance=inputs
    )
    if activation_gain is not None:
      saved = saved - activation_loss(w, activation_gain)
    gain = gain + 0.5 * squares.mean() * saved
  return Candidates(np.asarray(gain), len(gradients))


def activation_loss(
  w: Float[np.ndarray, "N K"], activation_gain: Float[np.ndarray, "K"]
) -> Float[np.ndarray, "S"]:
  """Squared output error that each subgroup of unrefined activations adds.

  In the unit of `formats.refinement_gain`.
  """
  loss = np.square(w, dtype=np.float64).sum(axis=0) * activation_gain
  padding = -loss.size % formats.GROUP
  return np.pad(loss, (0, padding)).reshape(-1, formats.SUBGROUP).sum(axis=1)


def spend(candidates: Mapping[Key, Candidates], rho: float) -> dict[Key, int]:
  """Gives each input a number of refined subgroups.

  Subgroups are taken in the order of what they save per byte, at most
  `MAX_REFINED_PER_GROUP` in a group, until the bytes are spent that a share
  `rho` of every input would take, or nothing is left that saves anything; each
  input gets at least one.

  Args:
    candidates: For each input, what refining it saves.
    rho: Share of all subgroups, weighed by their bytes.

  Returns:
    The number of each; their bytes are at most those of `rho` everywhere.

  Raises:
    QTensorError: `rho` is outside [0, 0.5].
  """
  counts = dict.fromkeys(candidates, 0)
  left = sum(
    c.rows * formats.refinement_budget(formats.SUBGROUP * c.gain.size, rho)
    for c in candidates.values()
  )
  if rho == 0:
    return counts
  order = []
  for key, candidate in candidates.items():
    best = _eligible(candidate.gain)
    order.append((np.inf, candidate.rows, key))
    order += [
      (gain / candidate.rows, candidate.rows, key)
      for gain in best[1:]
      if gain > 0
    ]
  for _, rows, key in sorted(order, key=lambda item: -item[0]):
    if rows <= left:
      counts[key] += 1
      left -= rows
  return counts


def _eligible(gain):
  """Gains that a mask can reach, largest first."""
  groups = gain.reshape(-1, formats.SUBGROUPS_PER_GROUP)
  best = -np.sort(-groups, axis=1)[:, : formats.MAX_REFINED_PER_GROUP]
  return -np.sort(-best.ravel())
