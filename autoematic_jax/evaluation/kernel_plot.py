"""Speed of the GEMM's forms against bf16, as a picture."""

from collections.abc import Sequence
from typing import Any

from autoematic_jax import reporting


def draw(rows: Sequence[dict[str, Any]], title: str, path: str) -> None:
  """Draws a panel for each shape: speed against bf16 by rows of x.

  Args:
    rows: Of `bench kernels`, bf16 among the forms.
    title: Stands above all panels.
    path: Image file to write.

  Raises:
    AutoematicError: matplotlib is missing or the file cannot be written.
  """
  pyplot = reporting.require_matplotlib()
  shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
  figure, axes = pyplot.subplots(
    1,
    len(shapes),
    squeeze=False,
    sharey=True,
    figsize=(4.8 * len(shapes) + 1, 4),
    layout="constrained",
  )
  figure.suptitle(title, fontsize=11)
  for axis, (n, k) in zip(axes[0], shapes, strict=True):
    here = [row for row in rows if (row["n"], row["k"]) == (n, k)]
    for form in dict.fromkeys(row["form"] for row in here):
      line = [row for row in here if row["form"] == form]
      axis.plot(
        [row["m"] for row in line],
        [row["ratio_to_bf16"] for row in line],
        marker="o",
        markersize=4,
        color="black" if form == "bf16" else None,
        label=form,
      )
    axis.set_xscale("log", base=2)
    axis.set_xlabel("rows of activations")
    axis.set_title(f"N = {n}, K = {k}", fontsize=10)
    axis.grid(alpha=0.3)
  axes[0][0].set_ylabel("speed against bf16")
  axes[0][-1].legend(fontsize=8)
  reporting.save_figure(figure, path)
