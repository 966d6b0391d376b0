"""Constants of the policy, varied over recorded signals.

What the oracle wanted is known for every layer and pass, so that settings of
the policy can be judged by replaying the signals, without running the model.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.policies.contestants import AT_ONCE
from autoematic_jax.evaluation.policies.passes import KINDS
from autoematic_jax.evaluation.policies.replay import RECORDED_FIELDS
from autoematic_jax.evaluation.policies.replay import replay
from autoematic_jax.evaluation.policies.scores import Rates
from autoematic_jax.evaluation.policies.scores import rates
from autoematic_jax.evaluation.policies.signal_reports import SignalReport
from autoematic_jax.policy import PolicyConfig

Setting = dict[str, Any]
"""Fields of `PolicyConfig` that differ from the policy of the recording."""

PARTS = ("all", *KINDS)

_SWEEPS: dict[str, tuple[Any, ...]] = {
  "prefill_run": (1, 2, 4, 8),
  "alpha": (1, 2, 4, 8),
  "beta": (1, 2, 4, 8),
  "tau": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
  "lambda_decode": (0.1, 0.3, 0.5, 0.7, 1.0),
  "spike_sigmas": (0.0, 1.0, 3.0, 1000.0),
  "skip_layers": (0, 1, 2),
  "min_stats": (1, 2, 8, 32),
  "stats_scope": ("sequence", "step"),
}
"""The paper's values (Figure 28), and some for what it does not vary; nothing
spikes by a thousand standard deviations, so that prefills keep their level."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """One setting's scores.

  Attributes:
    setting: What was changed.
    scores: By report, by `all` of its conversations or a half of them, and by
      kind of pass or `all` of them: what `rates` gives. A kind that did
      not occur is left out.
  """

  setting: Setting
  scores: dict[str, dict[str, dict[str, Rates]]]

  @property
  def name(self) -> str:
    """The setting as text."""
    changed = (f"{key}={_text(value)}" for key, value in self.setting.items())
    return " ".join(changed) or "recorded"

  def mean(self, half: str, part: str) -> Rates | None:
    """Rates with every report counting the same.

    Args:
      half: Of the conversations: `all`, `first` or `second`.
      part: Kind of pass, or `all`.

    Returns:
      Means over the reports that have such passes; None where none has.
    """
    halves = [by_half[half] for by_half in self.scores.values()]
    found = [by_part[part] for by_part in halves if part in by_part]
    if not found:
      return None
    return {key: float(np.mean([s[key] for s in found])) for key in found[0]}


def _text(value):
  return ",".join(map(str, value)) if isinstance(value, list) else f"{value}"


def one_at_a_time(reports: Sequence[SignalReport]) -> list[Setting]:
  """The recorded policy, and settings that change one constant of it."""
  levels = _common_levels(reports)
  subsets = [
    list(some)
    for count in range(len(levels), 0, -1)
    for some in itertools.combinations(levels, count)
  ]
  starts = dict.fromkeys(("decode_initial_level", "high_entropy_level"), levels)
  sweeps = {**_SWEEPS, **starts, "levels": subsets}
  changed = [{field: v} for field, values in sweeps.items() for v in values]
  return _distinct([{}, *changed, AT_ONCE], reports)


def grid(
  values: dict[str, Sequence[Any]], reports: Sequence[SignalReport]
) -> list[Setting]:
  """The recorded policy, and every combination of some values."""
  product = itertools.product(*values.values())
  changed = [dict(zip(values, chosen, strict=True)) for chosen in product]
  return _distinct([{}, *changed], reports)


def _distinct(settings, reports):
  """Leaves out what gives every report a policy that it was given before."""
  found = {}
  for setting in settings:
    policies = tuple(apply(report, setting) for report in reports)
    found.setdefault(policies, setting)
  return list(found.values())


def _common_levels(reports):
  return sorted(set.intersection(*(set(r.policy.levels) for r in reports)))


def apply(report: SignalReport, setting: Setting) -> PolicyConfig:
  """The report's policy with a setting.

  Raises:
    AutoematicError: A value is refused, or cannot be judged on the recording.
  """
  fixed = sorted(set(setting) & set(RECORDED_FIELDS))
  if fixed:
    raise AutoematicError(
      f"{', '.join(fixed)}: part of how the signals were recorded; run"
      " autoematic policies with another value instead"
    )
  changed = PolicyConfig.from_dict({**report.policy.to_dict(), **setting})
  if not set(changed.levels) <= set(report.policy.levels):
    raise AutoematicError(
      f"levels={list(changed.levels)}: {report.name} was recorded with"
      f" {list(report.policy.levels)} only"
    )
  return changed


def in_first_half(index: int) -> bool:
  """Whether a conversation is one that a setting may be chosen on.

  Halves go 0110: by odd and even, conversations that alternate between one
  turn and several would all fall into one half.
  """
  return index % 4 in (0, 3)


def measure(
  reports: Sequence[SignalReport], settings: Sequence[Setting]
) -> list[Result]:
  """Scores settings by replay, in their order."""
  results = []
  with tqdm(settings, desc="settings", unit="setting") as bar:
    for setting in bar:
      found = {}
      for report in reports:
        levels = replay(apply(report, setting), report.signals)
        found[report.name] = _by_half(report, levels)
      results.append(Result(setting=setting, scores=found))
  return results


def _by_half(report, levels):
  every = range(len(levels))
  halves = {
    "all": every,
    "first": [index for index in every if in_first_half(index)],
    "second": [index for index in every if not in_first_half(index)],
  }
  return {half: _by_part(report, levels, i) for half, i in halves.items()}


def _by_part(report, levels, indices):
  chosen, wanted, kinds = (
    np.concatenate([arrays[index] for index in indices])
    for arrays in (levels, report.wanted, report.kinds)
  )
  masks = {part: kinds == part for part in KINDS}
  masks["all"] = np.full(len(kinds), True)
  return {
    part: rates(chosen[masks[part]], wanted[masks[part]])
    for part in PARTS
    if masks[part].any()
  }


def choose(
  results: Sequence[Result], *, max_under: float, part: str = "all"
) -> Result:
  """The setting that does best on the first half of the conversations.

  Args:
    results: From `measure`.
    max_under: Highest share of layer executions below the oracle's level.
    part: Kind of pass that counts, or `all`.

  Returns:
    The lowest bits among those that keep `max_under`; where none does, the
    lowest share below. Ties go to less below, less above, then to the first.

  Raises:
    AutoematicError: The first half has no such pass.
  """

  def cost(result):
    found = result.mean("first", part)
    if found is None:
      raise AutoematicError(f"no {part} among the passes to choose on")
    under = found["underprovision"]
    missed = under if under > max_under else 0.0
    return missed, found["execution_bits"], under, found["overprovision"]

  return min(results, key=cost)


def check_halves(reports: Sequence[SignalReport]) -> None:
  """Refuses what cannot be split in halves or told apart.

  Raises:
    AutoematicError: A report holds one conversation only, or is given twice.
  """
  for report in reports:
    if len(report.signals) < 2:
      raise AutoematicError(
        f"{report.name}: one conversation only; a setting is chosen on one half"
        " of them and judged on the other"
      )
  names = [report.name for report in reports]
  for twice in {name for name in names if names.count(name) > 1}:
    raise AutoematicError(f"{twice} is given twice")


def table(results: Sequence[Result]) -> str:
  """Every setting on all conversations, means over reports, as text."""
  width = max(len(result.name) for result in results)
  parts = [part for part in PARTS if results[0].mean("all", part)]
  lines = [
    " " * width + "".join(f"  {part:^19}" for part in parts),
    " " * width + f"  {'bits':>5} {'under':>6} {'over':>6}" * len(parts),
  ]
  for result in results:
    cells = (rates_text(result.mean("all", part)) for part in parts)
    lines.append(f"{result.name:{width}}" + "".join(f"  {c}" for c in cells))
  return "\n".join(line.rstrip() for line in lines)


def rates_text(found: Rates | None) -> str:
  """Bits and the shares below and above, of one width."""
  if found is None:
    return f"{'no such pass':>19}"
  return (
    f"{found['execution_bits']:>5.2f} {found['underprovision']:>6.1%}"
    f" {found['overprovision']:>6.1%}"
  )
