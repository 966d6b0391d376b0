"""Settings of the policy as points: what they cost and what they miss."""

import itertools
from collections.abc import Sequence

from autoematic_jax import reporting
from autoematic_jax.evaluation.policies.ablation import Result

_MARKERS = "osD^vP<>*Xh"


def draw(results: Sequence[Result], chosen: Result, path: str) -> None:
  """Draws shares below the oracle against bits, a panel a report.

  Args:
    results: From `ablation.measure`, the recorded policy first.
    chosen: One of them, marked as well.
    path: Image file to write.

  Raises:
    AutoematicError: matplotlib is missing or the file cannot be written.
  """
  pyplot = reporting.require_matplotlib()
  reports = list(results[0].scores)
  figure, axes = pyplot.subplots(
    1,
    len(reports),
    squeeze=False,
    figsize=(5.2 * len(reports) + 1.5, 4.2),
    layout="constrained",
  )
  for axis, report in zip(axes.flat, reports, strict=True):
    _panel(axis, report, results)
    _ring(axis, report, results[0], "recorded", "black")
    _ring(axis, report, chosen, "chosen", "tab:red")
    axis.set_title(report)
    axis.set_xlabel("mean execution bits")
  axes[0, 0].set_ylabel("below the oracle (% of layer executions)")
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside right center", fontsize=8)
  reporting.save_figure(figure, path)


def _panel(axis, report, results):
  """One marker for each field, or combination of fields, that was changed."""
  markers = itertools.cycle(_MARKERS)
  fields = dict.fromkeys(tuple(result.setting) for result in results[1:])
  for names in fields:
    members = [r for r in results[1:] if tuple(r.setting) == names]
    points = [_point(member, report) for member in members]
    axis.plot(
      *zip(*points, strict=True),
      linestyle="none",
      marker=next(markers),
      alpha=0.7,
      label=", ".join(names),
    )


def _ring(axis, report, result, label, color):
  axis.plot(
    *_point(result, report),
    linestyle="none",
    marker="o",
    markersize=13,
    fillstyle="none",
    color=color,
    label=label,
  )


def _point(result, report):
  rates = result.scores[report]["all"]["all"]
  return rates["execution_bits"], 100 * rates["underprovision"]
