"""Accuracy against execution bits, as a picture."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from autoematic_jax import reporting

_MARKERS = "osD^vP"
_TICKS = (2, 4, 6, 8, 16, 32)
_NARROWEST = 0.25
"""Height of a panel of scores, at least."""
_KL = "mean KL divergence from fp32 (nats)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Point:
  """One precision in one panel.

  Attributes:
    label: The precision.
    bits: Execution bits.
    weights: Their format and stored bits.
    value: What was measured.
    low: Lower end of its 95% interval.
    high: Upper end.
  """

  label: str
  bits: float
  weights: str
  value: float
  low: float
  high: float


def draw(rows: Sequence[dict[str, Any]], title: str, path: str) -> None:
  """Draws a panel for the text's mean KL and one for each task.

  Args:
    rows: Of an evaluation.
    title: Stands above all panels.
    path: Image file to write.

  Raises:
    AutoematicError: matplotlib is missing or the file cannot be written.
  """
  pyplot = reporting.require_matplotlib()
  panels = _panels(rows)
  columns = math.ceil(math.sqrt(len(panels)))
  lines = -(-len(panels) // columns)
  figure, axes = pyplot.subplots(
    lines,
    columns,
    squeeze=False,
    figsize=(max(4.8 * columns, 6), 3.9 * lines + 0.5),
    layout="constrained",
  )
  weights = dict.fromkeys(map(_weights, rows))
  markers = dict(zip(weights, itertools.cycle(_MARKERS), strict=False))
  for axis, (name, points) in zip(axes.flat, panels.items(), strict=False):
    _panel(axis, name, points, markers)
    if name != _KL:
      _as_percentages(axis)
  for axis in list(axes.flat)[len(panels) :]:
    axis.set_visible(False)
  figure.suptitle(f"{title}: accuracy by execution bits, 95% intervals")
  _legend(figure, markers)
  # Only a figure that is laid out tells where its labels overlap.
  figure.draw_without_rendering()
  for axis in axes.flat:
    _spread_labels(axis)
  reporting.save_figure(figure, path)


def _panels(rows):
  panels = {}
  if "kl_mean" in rows[0]:
    panels[_KL] = [
      _point(row, row["kl_mean"], *row["kl_mean_interval"]) for row in rows
    ]
  for name, first in rows[0].get("tasks", {}).items():
    panels[f"{name} (n = {first['n']})"] = [
      _point(row, task["score"], task["low"], task["high"], task)
      for row in rows
      for task in [row["tasks"][name]]
    ]
  return panels


def _weights(row):
  return f"{row['format']}, {row['stored_bits']:.2f} stored bits a weight"


def _point(row, value, low, high, measured=None):
  name = row["precision"]
  return _Point(
    label=f"{name} bits" if name.isdecimal() else name,
    bits=(measured or row)["execution_bits"],
    weights=_weights(row),
    value=value,
    # Rounding can put a mean outside of an interval that has no width.
    low=min(low, value),
    high=max(high, value),
  )


def _panel(axis, name, points, markers):
  for point in points:
    axis.errorbar(
      point.bits,
      point.value,
      yerr=[[point.value - point.low], [point.high - point.value]],
      fmt=markers[point.weights],
      color="tab:blue",
      ecolor="tab:gray",
      capsize=3,
      markersize=6,
    )
    axis.annotate(
      point.label,
      (point.bits, point.high),
      xytext=(0, 7),
      textcoords="offset points",
      ha="center",
      fontsize=9,
    )
  axis.set_title(name, fontsize=11)
  axis.set_xlabel("execution bits")
  axis.set_xscale("log", base=2)
  lowest = min(point.bits for point in points)
  highest = max(point.bits for point in points)
  ticks = [tick for tick in _TICKS if lowest * 0.7 < tick < highest * 1.4]
  axis.set_xticks(ticks, map(str, ticks))
  axis.set_xlim(lowest * 0.8, highest * 1.25)
  axis.margins(y=0.2)
  axis.grid(alpha=0.3)


def _as_percentages(axis):
  low, high = axis.get_ylim()
  # Scores that are all alike would be drawn a thousandth apart.
  room = max(0.0, _NARROWEST - (high - low)) / 2
  axis.set_ylim(low - room, high + room)
  ticks = [tick for tick in axis.get_yticks() if -1e-9 <= tick <= 1 + 1e-9]
  limits = axis.get_ylim()
  axis.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
  axis.set_ylim(limits)


def _legend(figure, markers):
  from matplotlib import lines

  handles = [
    lines.Line2D(
      [], [], linestyle="", color="tab:blue", marker=marker, label=weights
    )
    for weights, marker in markers.items()
  ]
  figure.legend(handles=handles, loc="outside lower center", frameon=False)


def _spread_labels(axis):
  """Moves each label up until it is clear of those before it."""
  placed = []
  for label in axis.texts:
    while any(label.get_window_extent().overlaps(box) for box in placed):
      x, y = label.xyann
      label.xyann = (x, y + 2)
    placed.append(label.get_window_extent())
