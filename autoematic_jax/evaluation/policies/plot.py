"""The oracle's levels as a picture."""

from collections.abc import Sequence

from autoematic_jax import reporting
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.evaluation.policies.contestants import oracle_levels

_MOST = 4
"""Conversations in one picture."""


def draw(
  rows: Sequence[Record], levels: Sequence[int], title: str, path: str
) -> None:
  """Draws bits by layer (rows) and pass (columns), a panel a conversation.

  Args:
    rows: The oracle's; the longest conversations are taken.
    levels: That it chose from, ascending.
    title: Stands above all panels.
    path: Image file to write.

  Raises:
    AutoematicError: matplotlib is missing or the file cannot be written.
  """
  pyplot = reporting.require_matplotlib()
  longest = sorted(range(len(rows)), key=lambda i: -len(rows[i]["passes"]))
  shown = [rows[index] for index in sorted(longest[:_MOST])]
  figure, axes = pyplot.subplots(
    len(shown),
    1,
    squeeze=False,
    figsize=(11, 2.6 * len(shown) + 0.6),
    layout="constrained",
  )
  for axis, row in zip(axes.flat, shown, strict=True):
    reporting.draw_levels(axis, oracle_levels(row).T, levels)
    _mark_turns(axis, row)
    axis.set_title(row["name"], fontsize=10, loc="right")
    axis.set_ylabel("layer")
  axes[-1, 0].set_xlabel("pass (dashed red: prefill and refills)")
  reporting.draw_level_bar(figure, axes, levels)
  figure.suptitle(title)
  reporting.save_figure(figure, path)


def _mark_turns(axis, row):
  for number, step in enumerate(row["passes"]):
    if step["kind"] != "decode":
      axis.axvline(number, color="tab:red", linestyle="--", linewidth=1)
      axis.annotate(
        f"{step['tokens']} tokens",
        (number, axis.get_ylim()[1]),
        xytext=(2, 2),
        textcoords="offset points",
        fontsize=7,
        color="tab:red",
      )
