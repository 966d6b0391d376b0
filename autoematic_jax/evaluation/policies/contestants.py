"""The policies that are compared, and the levels that they force."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from autoematic_jax.evaluation.journal import Record
from autoematic_jax.evaluation.policies.passes import KINDS
from autoematic_jax.evaluation.policies.traces import level_shares
from autoematic_jax.policy import PolicyConfig

AT_ONCE = {"prefill_run": 1, "alpha": 1, "beta": 1}
"""Constants that follow every rise and fall (the paper's Table 11)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
  """One way to choose levels.

  Attributes:
    name: Of the policy.
    forced: Of a conversation's index and the oracle's row about it: `[P, L]`
      bits, or None where `policy` decides while the model runs.
    policy: Constants of the run-time policy.
  """

  name: str
  policy: PolicyConfig
  forced: Callable[[int, Record], np.ndarray | None] = lambda index, row: None


def shape_of(row: Record) -> tuple[int, int]:
  """Passes and layers of a conversation."""
  return len(row["passes"]), len(row["passes"][0]["levels"])


def oracle_levels(row: Record) -> np.ndarray:
  """`[P, L]` bits that the oracle chose."""
  return np.asarray([step["levels"] for step in row["passes"]])


def independent(policy: PolicyConfig) -> list[Contestant]:
  """Those that need nothing but the oracle's trace, `adaptive` first.

  `instantaneous` follows every rise and fall of the metric (runs of one
  layer); `activity` leaves the entropy out of the metric of decode.

  Args:
    policy: The policy that is judged.
  """
  at_once = dataclasses.replace(policy, **AT_ONCE)
  alone = dataclasses.replace(policy, lambda_decode=1.0)
  return [
    Contestant(name="adaptive", policy=policy),
    Contestant(name="instantaneous", policy=at_once),
    Contestant(name="activity", policy=alone),
    *(_uniform(policy, level) for level in policy.levels),
    Contestant(
      name="oracle",
      policy=policy,
      forced=lambda index, row: oracle_levels(row),
    ),
  ]


def _uniform(policy, level):
  return Contestant(
    name=f"uniform {level}",
    policy=policy,
    forced=lambda index, row: np.full(shape_of(row), level),
  )


def static(policy: PolicyConfig, levels: Sequence[int]) -> Contestant:
  """The same level of each layer at every pass."""
  return Contestant(
    name="static",
    policy=policy,
    forced=lambda index, row: np.broadcast_to(
      np.asarray(levels), shape_of(row)
    ),
  )


def random(
  policy: PolicyConfig, shares: dict[str, dict[str, float]], seed: int
) -> Contestant:
  """Levels drawn for each layer and pass.

  Args:
    policy: Its levels are drawn from.
    shares: For each kind of pass, the probability of each level.
    seed: Of the draws; a conversation's depend on it and its index alone.
  """

  def forced(index, row):
    rng = np.random.default_rng([seed, index])
    layers = shape_of(row)[1]
    return np.stack(
      [
        rng.choice(
          [int(bits) for bits in shares[step["kind"]]],
          size=layers,
          p=list(shares[step["kind"]].values()),
        )
        for step in row["passes"]
      ]
    )

  return Contestant(name="random", policy=policy, forced=forced)


def assign(
  levels: Sequence[int], sensitivity: Float[np.ndarray, "N L"], bits: float
) -> list[int]:
  """Levels of the layers by how much each one matters.

  All layers begin at the highest level. The one whose next lower level costs
  the least for each bit saved goes down, as long as that brings the mean
  closer to `bits`.

  Args:
    levels: The N levels, ascending.
    sensitivity: KL divergence of the model with one layer at a level and all
      others at the highest.
    bits: Mean to reach.

  Returns:
    Bits of each layer.
  """
  layers = sensitivity.shape[1]
  chosen = np.full((layers,), len(levels) - 1)
  bits_of = np.asarray(levels, np.float64)
  while True:
    mean = bits_of[chosen].mean()
    steps = [
      (
        (sensitivity[at - 1, layer] - sensitivity[at, layer])
        / (bits_of[at] - bits_of[at - 1]),
        layer,
      )
      for layer, at in enumerate(chosen)
      if at > 0
    ]
    if not steps:
      break
    layer = min(steps)[1]
    saved = bits_of[chosen[layer]] - bits_of[chosen[layer] - 1]
    if abs(mean - saved / layers - bits) >= abs(mean - bits):
      break
    chosen[layer] -= 1
  return [int(levels[index]) for index in chosen]


def shares_by_kind(
  rows: Sequence[Record], records: Sequence[Record]
) -> dict[str, dict[str, float]]:
  """Share of each level by kind of pass.

  Args:
    rows: The oracle's, which say the kinds.
    records: Of one policy on the same conversations.
  """
  levels: dict[str, list[int]] = {kind: [] for kind in KINDS}
  for row, record in zip(rows, records, strict=True):
    for step, chosen in zip(row["passes"], record["levels"], strict=True):
      levels[step["kind"]] += chosen
  return {
    kind: level_shares(np.asarray(chosen))
    for kind, chosen in levels.items()
    if chosen
  }
