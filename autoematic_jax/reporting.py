"""What a person sees of a generation: a summary and a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoematic_jax.errors import AutoematicError
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.results import GenerationResult


def _shares(levels: np.ndarray) -> dict[str, float]:
  executed = levels[levels > 0]
  if not executed.size:
    return {}
  found, counts = np.unique(executed, return_counts=True)
  return {
    str(level): float(count / executed.size)
    for level, count in zip(found, counts, strict=True)
  }


def level_shares(result: GenerationResult) -> dict[str, dict[str, float]]:
  """Share of layer executions at each level, prefill and decode apart."""
  return {
    "prefill": _shares(result.prefill_levels),
    "decode": _shares(result.trace),
  }


def execution_bits(result: GenerationResult) -> dict[str, float | None]:
  """Mean nominal bits over layers, steps and requests that ran."""

  def mean(levels):
    executed = levels[levels > 0]
    return float(executed.mean()) if executed.size else None

  return {
    "prefill": mean(result.prefill_levels),
    "decode": mean(result.trace),
  }


def summary(result: GenerationResult, model: LanguageModel) -> str:
  """A few lines about speed and precision."""
  bits = execution_bits(result)
  shares = level_shares(result)
  generated = sum(map(len, result.token_ids))
  multiplied = ""
  if model.levels:
    multiplied = f", multiplied by {model.implementation}"
  lines = [
    f"prompt tokens {sum(result.prompt_tokens)}, new tokens {generated}",
    f"decode        {result.decode_tokens_per_second:.1f} tokens/s",
    f"first token   {result.time_to_first_token:.2f} s"
    f" (+ {result.compile_seconds:.1f} s compiling)",
    f"weights       {model.format}, {model.stored_bits:.2f} stored bits a"
    f" weight{multiplied}",
  ]
  for phase in ("prefill", "decode"):
    if bits[phase] is not None:
      parts = ", ".join(
        f"{share:.0%} at {level}" for level, share in shares[phase].items()
      )
      lines.append(f"{phase:13} {bits[phase]:.2f} execution bits ({parts})")
  return "\n".join(lines)


def require_matplotlib():
  """The plotting module, drawing to files.

  Raises:
    AutoematicError: matplotlib is not installed.
  """
  try:
    import matplotlib
  except ImportError:
    raise AutoematicError(
      "plots need matplotlib: pip install 'autoematic_jax[plot]'"
    ) from None
  matplotlib.use("Agg")
  from matplotlib import pyplot

  return pyplot


def save_figure(figure: Any, path: str) -> None:
  """Writes a figure of matplotlib and lets go of it.

  Raises:
    AutoematicError: The file cannot be written.
  """
  try:
    figure.savefig(path, dpi=120, bbox_inches="tight")
  except (OSError, ValueError) as error:
    raise AutoematicError(f"cannot write {path}: {error}") from error
  finally:
    require_matplotlib().close(figure)


def plot_trace(
  result: GenerationResult, levels: tuple[int, ...], path: str
) -> None:
  """Draws bits by layer (rows) and step (columns) of the first request.

  Args:
    result: A generation.
    levels: Levels of the checkpoint, for the colours.
    path: Image file to write.

  Raises:
    AutoematicError: matplotlib is missing or the file cannot be written.
  """
  pyplot = require_matplotlib()
  shown = sorted(set(levels) | set(np.unique(result.prefill_levels).tolist()))
  prefill = result.prefill_levels[:, :1]
  decode = result.trace[:, :, 0].T
  decode = decode[:, (decode > 0).any(axis=0)] if decode.size else decode
  figure, axes = pyplot.subplots(
    1, 2, width_ratios=[1, 12], sharey=True, figsize=(10, 4.5)
  )
  for axis, grid, title in zip(
    axes, (prefill, decode), ("prefill", "decode step"), strict=True
  ):
    draw_levels(axis, grid, shown)
    axis.set_xlabel(title)
  axes[0].set_xticks([])
  axes[0].set_ylabel("layer")
  axes[1].set_title("bits of each layer, chosen at run time")
  draw_level_bar(figure, axes, shown)
  save_figure(figure, path)


def draw_levels(axis: Any, grid: np.ndarray, shown: Sequence[int]) -> None:
  """Colours a grid of bits.

  Args:
    axis: Of matplotlib.
    grid: `[layers, steps]` bits.
    shown: Bits that have a colour, ascending.
  """
  if not grid.size:
    return
  index = {level: position for position, level in enumerate(shown)}
  axis.imshow(
    np.vectorize(index.get, otypes=[float])(grid),
    cmap=_palette(shown),
    vmin=-0.5,
    vmax=len(shown) - 0.5,
    aspect="auto",
    interpolation="nearest",
    origin="lower",
  )


def draw_level_bar(figure: Any, axes: Any, shown: Sequence[int]) -> None:
  """Tells which colour of `draw_levels` stands for which bits."""
  from matplotlib import cm
  from matplotlib import colors

  scale = colors.Normalize(-0.5, len(shown) - 0.5)
  image = cm.ScalarMappable(scale, _palette(shown))
  bar = figure.colorbar(image, ax=axes, ticks=range(len(shown)))
  bar.ax.set_yticklabels([f"{level} bits" for level in shown])


def _palette(shown):
  from matplotlib import colors

  viridis = require_matplotlib().get_cmap("viridis")
  return colors.ListedColormap(viridis(np.linspace(0.1, 0.95, len(shown))))
