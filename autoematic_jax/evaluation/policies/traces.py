"""The oracle's traces: made, remembered, summed up and read back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.evaluation.policies import oracle
from autoematic_jax.evaluation.policies import recording
from autoematic_jax.evaluation.policies.conversations import Conversation
from autoematic_jax.evaluation.policies.conversations import encode
from autoematic_jax.evaluation.policies.passes import KINDS
from autoematic_jax.language_model import LanguageModel

_FIELDS = ("name", "turns", "answers", "passes")


def measure(
  judged: LanguageModel,
  baseline: LanguageModel,
  conversations: Sequence[Conversation],
  options: oracle.OracleOptions,
  max_new_tokens: int,
  journal: Journal,
) -> list[Record]:
  """Answers each conversation in full precision and asks the oracle.

  Args:
    judged: The quantized model.
    baseline: The same in full precision.
    conversations: What the models are told.
    options: Levels and budget.
    max_new_tokens: Tokens of an answer at most.
    journal: Remembers finished conversations.

  Returns:
    For each conversation the fields of its `Recording`, the texts of its
    answers and the `passes` of `oracle.trace`.
  """
  capacity = max(
    recording.room(baseline, encode(baseline, item), max_new_tokens)
    for item in conversations
  )
  rows = []
  with tqdm(conversations, desc="conversations", unit="conversation") as bar:
    for index, item in enumerate(bar):
      row = journal.find("conversation", index)
      if row is None:
        recorded = recording.record(
          baseline, item, max_new_tokens=max_new_tokens, capacity=capacity
        )
        row = _row(judged, baseline, recorded, options, capacity)
        journal.add("conversation", index, record=row)
      rows.append(row)
  return rows


def _row(judged, baseline, recorded, options, capacity):
  total = len(recorded.passes)
  with tqdm(total=total, desc=recorded.name, unit="pass", leave=False) as bar:
    passes = oracle.trace(
      judged,
      baseline,
      recorded,
      options,
      capacity=capacity,
      on_pass=lambda step: bar.update(),
    )
  texts = [baseline.tokenizer.decode(answer) for answer in recorded.answers]
  return {**recorded.to_dict(), "texts": texts, "passes": passes}


def level_shares(levels: np.ndarray) -> dict[str, float]:
  """Share of each of some bits among all of them."""
  found, counts = np.unique(levels, return_counts=True)
  return {
    str(level): float(count / levels.size)
    for level, count in zip(found, counts, strict=True)
  }


def summary(rows: Sequence[Record], budget: float) -> dict[str, Any]:
  """What the oracle chose, by kind of pass and over `all` of them.

  Args:
    rows: From `measure`.
    budget: The oracle's.

  Returns:
    For each kind that there was the number of `passes`, their mean
    `execution_bits`, the `shares` of the levels and, as `over_budget`, the
    share of layers that kept the budget at no level.
  """
  every = [step for row in rows for step in row["passes"]]
  kinds = {kind: [s for s in every if s["kind"] == kind] for kind in KINDS}
  return {
    name: _part(steps, budget)
    for name, steps in {**kinds, "all": every}.items()
    if steps
  }


def _part(steps, budget):
  levels = np.asarray([step["levels"] for step in steps])
  kl = np.asarray([step["kl"] for step in steps])
  return {
    "passes": len(steps),
    "execution_bits": float(levels.mean()),
    "shares": level_shares(levels),
    "over_budget": float((~(kl <= budget)).mean()),
  }


def table(parts: dict[str, Any]) -> str:
  """A summary as text."""
  lines = [
    f"{'':>8} {'passes':>7} {'exec bits':>9} {'over budget':>12}  shares"
  ]
  for name, part in parts.items():
    lines.append(
      f"{name:>8} {part['passes']:>7} {part['execution_bits']:>9.2f}"
      f" {part['over_budget']:>12.1%}  {share_text(part['shares'])}"
    )
  return "\n".join(lines)


def share_text(shares: dict[str, float]) -> str:
  """Shares of levels as text."""
  return ", ".join(f"{share:.0%} at {bits}" for bits, share in shares.items())


def read(file: str) -> dict[str, Any]:
  """A report of `autoematic oracle`.

  Raises:
    AutoematicError: The file cannot be read or is no such report.
  """
  try:
    report = json.loads(Path(file).read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise AutoematicError(f"--oracle {file}: {error}") from error
  rows = report.get("rows") if isinstance(report, dict) else None
  whole = isinstance(rows, list) and all(
    isinstance(row, dict) and set(_FIELDS) <= set(row) for row in rows
  )
  if not whole or not rows or not {"levels", "budget"} <= set(report):
    raise AutoematicError(
      f"--oracle {file}: not a report that autoematic oracle --json wrote"
    )
  return report


def check(report: dict[str, Any], judged: LanguageModel) -> None:
  """Refuses a report that was not made with a model like this.

  Raises:
    AutoematicError: Layers, levels or vocabulary differ.
  """
  layers = len(report["rows"][0]["passes"][0]["levels"])
  if layers != judged.config.num_layers:
    raise AutoematicError(
      f"--oracle is about a model of {layers} layers; the checkpoint has"
      f" {judged.config.num_layers}"
    )
  if tuple(report["levels"]) != judged.policy.levels:
    wanted = ",".join(map(str, report["levels"]))
    raise AutoematicError(
      f"--oracle chose from the levels {wanted}, the policy from"
      f" {','.join(map(str, judged.policy.levels))}; --policy-option"
      f" levels=[{wanted}] makes them agree"
    )
  highest = max(
    token
    for row in report["rows"]
    for tokens in (*row["turns"], *row["answers"])
    for token in tokens
  )
  if highest >= judged.config.vocab_size:
    raise AutoematicError(
      f"--oracle holds the token {highest}, outside the checkpoint's"
      f" vocabulary of {judged.config.vocab_size}"
    )
