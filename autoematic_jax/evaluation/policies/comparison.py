"""Runs policies along the oracle's conversations."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.evaluation.policies import contestants
from autoematic_jax.evaluation.policies import scores
from autoematic_jax.evaluation.policies import sensitivity
from autoematic_jax.evaluation.policies.contestants import Contestant
from autoematic_jax.evaluation.policies.passes import Session
from autoematic_jax.evaluation.policies.passes import capacity_of
from autoematic_jax.evaluation.policies.passes import divergence
from autoematic_jax.evaluation.policies.recording import Recording
from autoematic_jax.language_model import LanguageModel

_divergence = jax.jit(divergence)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """Two models and the conversations that both go through.

  Attributes:
    judged: The quantized model, with the policy that is judged.
    baseline: The same in full precision.
    rows: The oracle's, one a conversation.
    journal: Remembers what is finished.
  """

  judged: LanguageModel
  baseline: LanguageModel
  rows: Sequence[Record]
  journal: Journal

  @functools.cached_property
  def capacity(self) -> int:
    """Of all caches: one for all conversations, so that few shapes compile."""
    return max(
      capacity_of(Recording.from_dict(row).passes) for row in self.rows
    )


def measure(
  comparison: Comparison, windows: np.ndarray | None, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Scores every policy.

  Args:
    comparison: Models and conversations.
    windows: `[W, T]` token ids by which a fixed assignment is chosen; None
      leaves that policy out.
    seed: Of the random policy.

  Returns:
    One row of scores a policy, and for each conversation the oracle's levels
    and the signals that `adaptive` saw, as `replay.Signals.from_dict` takes
    them.
  """
  rows, policy = comparison.rows, comparison.judged.policy
  found = _run(comparison, contestants.independent(policy))
  shares = contestants.shares_by_kind(rows, found["adaptive"])
  others = [contestants.random(policy, shares, seed)]
  if windows is not None:
    bits = scores.summary(rows, found["adaptive"])["execution_bits"]
    costs = sensitivity.measure(
      comparison.judged, comparison.baseline, windows, comparison.journal
    )
    levels = contestants.assign(policy.levels, costs, bits)
    others.append(contestants.static(policy, levels))
  found |= _run(comparison, others)
  signals = [
    {
      "name": row["name"],
      "oracle_levels": contestants.oracle_levels(row).tolist(),
      **record,
    }
    for row, record in zip(rows, found["adaptive"], strict=True)
  ]
  return [
    {"policy": name, **scores.summary(rows, records)}
    for name, records in found.items()
  ], signals


def _run(comparison, entrants: Sequence[Contestant]) -> dict[str, list[Record]]:
  """Records of some policies by name, a conversation at a time."""
  found: dict[str, list[Record]] = {entrant.name: [] for entrant in entrants}
  total = len(entrants) * len(comparison.rows)
  with tqdm(total=total, desc="policies", unit="conversation") as progress:
    for index, row in enumerate(comparison.rows):
      targets = None
      for entrant in entrants:
        record = comparison.journal.find("policy", entrant.name, index)
        if record is None:
          if targets is None:
            targets = _targets(comparison, row)
          record = _follow(comparison, entrant, index, row, targets)
          comparison.journal.add("policy", entrant.name, index, record=record)
        found[entrant.name].append(record)
        progress.update()
  return found


def _targets(comparison, row):
  """Full-precision log-probabilities after each pass."""
  passes = Recording.from_dict(row).passes
  session = Session(comparison.baseline, comparison.capacity)
  return [session.run(step).log_probabilities for step in passes]


def _follow(comparison, entrant, index, row, targets):
  """Levels and KL divergence of each pass; what `adaptive` saw as well."""
  forced = entrant.forced(index, row)
  passes = Recording.from_dict(row).passes
  session = Session(comparison.judged, comparison.capacity, entrant.policy)
  outputs, kl = [], []
  for number, (step, log_p) in enumerate(zip(passes, targets, strict=True)):
    output = session.run(step, None if forced is None else forced[number])
    kl.append(float(_divergence(log_p, output.log_probabilities)))
    outputs.append(output)
  record = {
    "kinds": [step.kind for step in passes],
    "levels": [np.asarray(output.levels).tolist() for output in outputs],
    "kl": kl,
  }
  if entrant.name != "adaptive":
    return record
  return {
    **record,
    "activity": [np.asarray(output.activity).tolist() for output in outputs],
    "entropy": [float(output.entropy) for output in outputs],
  }
