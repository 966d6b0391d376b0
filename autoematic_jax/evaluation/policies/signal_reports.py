"""Signals and oracle's levels out of reports of `autoematic policies`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.policies.passes import KINDS
from autoematic_jax.evaluation.policies.replay import Signals
from autoematic_jax.policy import PolicyConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignalReport:
  """Conversations of one model, as its policy saw them and as the oracle did.

  Attributes:
    name: The file that it was read from.
    policy: Constants under which the signals were recorded.
    signals: Of each conversation.
    kinds: Of each conversation `[P]` kinds of pass.
    wanted: Of each conversation `[P, L]` bits that the oracle chose.
  """

  name: str
  policy: PolicyConfig
  signals: list[Signals]
  kinds: list[np.ndarray]
  wanted: list[np.ndarray]


def read(file: str) -> SignalReport:
  """Reads a report of `autoematic policies`.

  Raises:
    AutoematicError: The file cannot be read, is no such report, or its signals
      and the oracle's levels do not belong together.
  """
  try:
    report = json.loads(Path(file).read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise AutoematicError(f"{file}: {error}") from error
  entries = report.get("signals") if isinstance(report, dict) else None
  if not isinstance(entries, list) or not entries:
    raise AutoematicError(
      f"{file}: holds no signals; autoematic policies --json writes them"
    )
  try:
    found = _report(file, report, entries)
  except KeyError as error:
    raise AutoematicError(
      f"{file}: lacks {error}; autoematic policies --json writes it"
    ) from error
  except (TypeError, ValueError) as error:
    raise AutoematicError(f"{file}: {error}") from error
  for entry, signals, wanted in zip(
    entries, found.signals, found.wanted, strict=True
  ):
    _check(file, entry, signals, wanted)
  return found


def _report(file, report, entries: list[dict[str, Any]]) -> SignalReport:
  return SignalReport(
    name=file,
    policy=PolicyConfig.from_dict(report["policy"]),
    signals=[Signals.from_dict(entry) for entry in entries],
    kinds=[np.asarray(entry["kinds"]) for entry in entries],
    wanted=[np.asarray(entry["oracle_levels"]) for entry in entries],
  )


def _check(file, entry, signals, wanted):
  """Refuses a conversation whose parts differ in passes or layers."""
  unknown = sorted(set(entry["kinds"]) - set(KINDS))
  if unknown:
    raise AutoematicError(f"{file}: unknown kinds of pass {unknown}")
  seen = signals.activity.shape
  passes = (len(signals.decode), len(signals.entropy))
  if len(seen) != 2 or wanted.shape != seen or passes != (seen[0], seen[0]):
    raise AutoematicError(
      f"{file}: {entry.get('name')}: signals of"
      f" {' x '.join(map(str, seen))} passes and layers, the oracle's levels of"
      f" {' x '.join(map(str, wanted.shape))}"
    )
