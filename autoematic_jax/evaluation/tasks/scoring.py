"""From records of items to scores with intervals, by task and precision."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoematic_jax.evaluation.bootstrap import mean_interval
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.evaluation.tasks.runner import Records
from autoematic_jax.precisions import DENSE_DTYPES


def add_to_rows(rows: Sequence[dict[str, Any]], records: Records) -> None:
  """Gives each precision's row its scores under `tasks`.

  A row that has no `execution_bits` of a text gets the mean over its tasks'
  passes.

  Args:
    rows: One for each precision.
    records: From `runner.measure`.
  """
  base = baseline([row["precision"] for row in rows])
  for row in rows:
    name = row["precision"]
    row["tasks"] = {
      task: summary(by_precision[name], by_precision[base] if base else None)
      for task, by_precision in records.items()
    }
    every = [r for by_precision in records.values() for r in by_precision[name]]
    row.setdefault("execution_bits", _mean_bits(every))


def baseline(precisions: Sequence[str]) -> str | None:
  """The unquantized precision that differences are taken to, if one ran."""
  return next((name for name in DENSE_DTYPES if name in precisions), None)


def summary(
  records: Sequence[Record], base: Sequence[Record] | None
) -> dict[str, Any]:
  """Scores of one task at one precision.

  Args:
    records: Of its items.
    base: Of the same items at the baseline.

  Returns:
    `score`, the mean over `n` items, with a 95% interval from `low` to
    `high`; `difference`, the mean of each item's score less that of the
    baseline, with its interval, or None; means of what else was scored; and
    the mean bits of all passes.
  """
  scores = _column(records, "score")
  low, high = mean_interval(scores).tolist()
  difference: list[float | None] = [None] * 3
  if base is not None:
    paired = scores - _column(base, "score")
    difference = [float(paired.mean()), *mean_interval(paired).tolist()]
  names = ("difference", "difference_low", "difference_high")
  return {
    "score": float(scores.mean()),
    "low": low,
    "high": high,
    "n": len(records),
    **dict(zip(names, difference, strict=True)),
    **{
      name: float(_column(records, name).mean())
      for name in records[0]
      if name.endswith("_score")
    },
    "execution_bits": _mean_bits(records),
  }


def _column(records, name):
  return np.asarray([record[name] for record in records], np.float64)


def _mean_bits(records):
  passes = _column(records, "passes")
  return float(np.average(_column(records, "bits"), weights=passes))


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The scores as text."""
  base = baseline([row["precision"] for row in rows])
  names = list(rows[0]["tasks"])
  width = max(map(len, ("task", *names)))
  lines = [
    f"{'task':>{width}} {'precision':>12} {'exec bits':>9} {'stored':>7}"
    f" {'score':>7} {'95% interval':>16} {'minus ' + base if base else '':>10}"
    f" {'95% interval' if base else '':>17}".rstrip()
  ]
  for name in names:
    for row in rows:
      scores = row["tasks"][name]
      lines.append(
        f"{name:>{width}} {row['precision']:>12}"
        f" {scores['execution_bits']:>9.2f} {row['stored_bits']:>7.2f}"
        f" {scores['score']:>7.1%}"
        f" {_range(scores['low'], scores['high'], '.1%'):>16}"
        f"{_difference(scores, row['precision'] == base)}"
      )
  return "\n".join(lines)


def _difference(scores, is_base):
  if is_base or scores["difference"] is None:
    return ""
  low, high = scores["difference_low"], scores["difference_high"]
  return f" {scores['difference']:>+10.1%} {_range(low, high, '+.1%'):>17}"


def _range(low, high, form):
  return f"{low:{form}} to {high:{form}}"
