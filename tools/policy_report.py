"""Gathers what policies cost, ranks what they saw, and draws it.

    python tools/policy_report.py problems=policies-problems.json \
      text=policies-text.json --scores problems=eval.json \
      --json benchmarks/policy.json --plot docs/policy-signals.png

Each report of `autoematic policies` comes with a name for its conversations.
What `autoematic eval --tasks` scored under the same constants goes beside it.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import numpy as np

from autoematic_jax import reporting
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation.policies.contestants import AT_ONCE
from autoematic_jax.policy import PAPER
from autoematic_jax.policy import PolicyConfig

EDGES = (0.001, 0.01, 0.1, 0.3, 0.6)
"""Between the bins of entropy in the picture."""
FEWEST = 5
"""Steps in a bin that is drawn."""
FIELDS = ("underprovision", "overprovision", "execution_bits", "kl_mean")


def main() -> None:
  """Writes what was asked for."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("reports", nargs="+", metavar="SPLIT=FILE")
  parser.add_argument("--scores", nargs="*", default=[], metavar="SPLIT=FILE")
  parser.add_argument("--json", type=Path)
  parser.add_argument("--plot", help="of the reports under the defaults")
  args = parser.parse_args()
  found = [(split, load(file)) for split, file in map(_pair, args.reports)]
  if args.json:
    scored = [_pair(text) for text in args.scores]
    scores = task_scores(scored)
    for split, report in found:
      rows = rows_of(split, report, scores)
      reports.merge(
        args.json,
        rows,
        model=f"{rows[0]['model']}, {split}: {label(report['policy'])}",
        keys=("model", "split", "policy"),
        command=report["command"],
      )
    for _, file in scored:
      report = load(file)
      reports.merge(
        args.json,
        [],
        model=f"scores: {label(report['policy'])}, {Path(file).stem}",
        keys=(),
        command=report["command"],
      )
    reports.merge(
      args.json,
      [row_of_task(key, task) for key, task in scores.items()],
      model="all",
      keys=("model", "split", "policy"),
      command=shlex.join(["python", *sys.argv]),
    )
  drawn = [(s, r) for s, r in found if label(r["policy"]) == "adaptive"]
  for split, report in drawn:
    print(f"{report['checkpoint']}, {split}:", ranks_text(report))
  if args.plot:
    draw(drawn, args)


def _pair(text):
  split, file = text.split("=", 1)
  return split, file


def load(file: str) -> dict:
  """A report."""
  return json.loads(Path(file).read_text(encoding="utf-8"))


def label(policy: dict) -> str:
  """`adaptive` by the default's constants, else what differs from `paper`."""

  def changed(other: PolicyConfig) -> dict:
    constants = {**other.to_dict(), "levels": policy["levels"]}
    return {k: v for k, v in policy.items() if v != constants[k]}

  if not changed(PolicyConfig()):
    return "adaptive"
  if changed(PAPER) == AT_ONCE:
    return "instantaneous"
  return " ".join(["paper", *(f"{k}={v}" for k, v in changed(PAPER).items())])


def task_scores(pairs) -> dict[tuple[str, str, str], dict]:
  """Task of each model, split and policy."""
  found = {}
  for split, file in pairs:
    report = load(file)
    model = Path(report["checkpoint"]).name
    for row in report["rows"]:
      name = row["precision"]
      policy = f"uniform {name}"
      if name == "adaptive":
        policy = label(report["policy"])
      (task,) = row["tasks"].values()
      found[model, split, policy] = task
  return found


def row_of_task(key: tuple[str, str, str], task: dict) -> dict:
  """A row of a policy that was not held against the oracle."""
  return {
    **dict(zip(("model", "split", "policy"), key, strict=True)),
    **dict.fromkeys(FIELDS),
    "execution_bits": task["execution_bits"],
    "task_score": task["score"],
  }


def rows_of(split: str, report: dict, scores: dict) -> list[dict]:
  """Rows of the policies; under other than the default constants, of one.

  Takes the tasks that belong to them out of `scores`.
  """
  adaptive = label(report["policy"])
  rows = report["rows"] if adaptive == "adaptive" else report["rows"][:1]
  model = Path(report["checkpoint"]).name
  found = []
  for row in rows:
    policy = adaptive if row["policy"] == "adaptive" else row["policy"]
    task = scores.pop((model, split, policy), None)
    found.append(
      {
        "model": model,
        "split": split,
        "policy": policy,
        **{field: row[field] for field in FIELDS},
        "task_score": task and task["score"],
      }
    )
  return found


def ranks_text(report: dict) -> str:
  """How well each signal tells where the oracle wants the highest level.

  Each number is the chance that, of two layer executions of decode of which the
  oracle wants one at the highest level, the signal is higher there; 0.5 tells
  nothing. Skipped layers stay out.
  """
  policy = report["policy"]
  layers = slice(policy["skip_layers"], None)
  wanted = _passes(report, "oracle_levels", ("decode",))[:, layers]
  top = wanted == max(policy["levels"])
  activity = _passes(report, "activity", ("decode",))[:, layers]
  before = _passes(report, "before", ("decode",))[:, None]
  after = _passes(report, "entropy", ("decode",))[:, None]
  weight = policy["lambda_decode"]
  signals = {
    "activity": activity,
    "entropy before": before,
    "metric": weight * activity + (1 - weight) * before,
    "entropy after": after,
    "layer alone": top.mean(axis=0),
  }
  return ", ".join(
    f"{name} {_rank(np.broadcast_to(signal, top.shape), top):.2f}"
    for name, signal in signals.items()
  )


def _rank(signal, top):
  """Share of pairs that a signal orders rightly, ties counting half."""
  above, below = signal[top], np.sort(signal[~top])
  lower = np.searchsorted(below, above, "left")
  upper = np.searchsorted(below, above, "right")
  return (lower + upper).mean() / (2 * len(below))


def draw(found: list[tuple[str, dict]], args: argparse.Namespace) -> None:
  """Activity by layer beside what entropy tells, a row for each report."""
  pyplot = reporting.require_matplotlib()
  figure, axes = pyplot.subplots(
    len(found),
    2,
    squeeze=False,
    figsize=(10, 2.9 * len(found)),
    layout="constrained",
  )
  for (left, right), (split, report) in zip(axes, found, strict=True):
    model = Path(report["checkpoint"]).name
    budget = report["oracle"]["budget"]
    left.set_title(f"{model}, {split}", loc="left", fontsize=10)
    right.set_title(f"budget {budget:g} nats", loc="right", fontsize=10)
    _activity(left, report)
    _need(right, report)
  axes[0, 0].legend(fontsize=8)
  axes[0, 1].legend(fontsize=8)
  reporting.save_figure(figure, args.plot)


def _activity(axis, report):
  """Median and the middle 80% over passes, and the oracle's need."""
  for kinds, color in ((("decode",), "tab:blue"), (("prefill", "refill"), "k")):
    activity = _passes(report, "activity", kinds)
    low, middle, high = np.quantile(activity, (0.1, 0.5, 0.9), axis=0)
    layers = np.arange(len(middle))
    axis.plot(layers, middle, color=color, label=" and ".join(kinds))
    axis.fill_between(layers, low, high, color=color, alpha=0.15)
  axis.set_yscale("log")
  axis.set_xlabel("layer")
  axis.set_ylabel("update activity")
  other = axis.twinx()
  wanted = _passes(report, "oracle_levels", ("decode",))
  need = (wanted == max(report["policy"]["levels"])).mean(axis=0)
  other.plot(need, color="tab:red", linestyle=":")
  other.set_ylim(-0.02, 1.02)
  other.set_ylabel("oracle's share at the top", color="tab:red")


def _need(axis, report):
  """Share of layers that the oracle runs at the highest level, by entropy."""
  wanted = _passes(report, "oracle_levels", ("decode",))
  need = (wanted == max(report["policy"]["levels"])).mean(axis=1)
  for name, label_ in (
    ("before", "of the token that it reads: known"),
    ("entropy", "of the token that it writes: known too late"),
  ):
    entropy = _passes(report, name, ("decode",))
    where = np.digitize(entropy, EDGES)
    bins = [b for b in range(len(EDGES) + 1) if (where == b).sum() >= FEWEST]
    means = [need[where == b].mean() for b in bins]
    axis.plot(bins, means, marker="o", label=label_)
  axis.set_xticks(np.arange(len(EDGES)) + 0.5, list(map(str, EDGES)))
  axis.set_xlim(-0.5, len(EDGES) + 0.5)
  axis.set_ylim(-0.02, 1.02)
  axis.set_xlabel("entropy of a decode step")
  axis.set_ylabel("oracle's share at the top")


def _passes(report, name, kinds):
  """What the conversations hold about passes of some kinds."""
  parts = []
  for entry in report["signals"]:
    if name == "before":
      values = np.asarray([0.0, *entry["entropy"][:-1]])
    else:
      values = np.asarray(entry[name])
    parts.append(values[np.isin(entry["kinds"], kinds)])
  return np.concatenate(parts)


if __name__ == "__main__":
  main()
