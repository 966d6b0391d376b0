"""How far a policy's levels are from the oracle's, and what that costs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from autoematic_jax.evaluation.bootstrap import mean_interval
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.evaluation.policies.contestants import oracle_levels
from autoematic_jax.evaluation.policies.passes import KINDS
from autoematic_jax.evaluation.policies.traces import level_shares
from autoematic_jax.evaluation.policies.traces import share_text

Rates = dict[str, float]
"""`underprovision`, `overprovision` and `execution_bits`."""


def summary(
  rows: Sequence[Record], records: Sequence[Record]
) -> dict[str, Any]:
  """Scores of one policy.

  Args:
    rows: The oracle's, one a conversation.
    records: The policy's on the same: `levels` and `kl` of each pass.

  Returns:
    `underprovision` and `overprovision`, the shares of layer executions below
    and above the oracle's level; `execution_bits`; `kl_mean`, the mean over
    conversations of each one's mean over passes, with a 95% interval over
    conversations; `shares` of the levels; and the same `by_kind` of pass.
  """
  kinds = [np.asarray([s["kind"] for s in row["passes"]]) for row in rows]
  by_kind = {
    kind: _part(rows, records, [names == kind for names in kinds])
    for kind in KINDS
    if any((names == kind).any() for names in kinds)
  }
  every = _part(rows, records, [np.full(len(names), True) for names in kinds])
  return {**every, "by_kind": by_kind}


def rates(
  levels: Int[np.ndarray, "P L"], wanted: Int[np.ndarray, "P L"]
) -> Rates:
  """Shares of levels below and above the wanted ones, and their mean bits."""
  return {
    "underprovision": float((levels < wanted).mean()),
    "overprovision": float((levels > wanted).mean()),
    "execution_bits": float(levels.mean()),
  }


def _part(rows, records, masks):
  """Scores over the passes that a mask of each conversation picks."""
  picked = [
    (
      np.asarray(record["levels"])[mask],
      oracle_levels(row)[mask],
      np.asarray(record["kl"])[mask],
    )
    for row, record, mask in zip(rows, records, masks, strict=True)
    if mask.any()
  ]
  levels, wanted = (
    np.concatenate([part[i] for part in picked]) for i in range(2)
  )
  kl = np.asarray([part[2].mean() for part in picked])
  return {
    "passes": len(levels),
    "conversations": len(picked),
    **rates(levels, wanted),
    "kl_mean": float(kl.mean()),
    "kl_mean_interval": mean_interval(kl).tolist(),
    "shares": level_shares(levels),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Rows of policies as text."""
  lines = [
    f"{'policy':>14} {'exec bits':>9} {'under':>7} {'over':>7}"
    f" {'mean KL':>9} {'95% interval':>17}  shares"
  ]
  for row in rows:
    low, high = row["kl_mean_interval"]
    lines.append(
      f"{row['policy']:>14} {row['execution_bits']:>9.2f}"
      f" {row['underprovision']:>7.1%} {row['overprovision']:>7.1%}"
      f" {row['kl_mean']:>9.5f} {f'{low:.5f}-{high:.5f}':>17}"
      f"  {share_text(row['shares'])}"
    )
  return "\n".join(lines)
