"""Perplexity, and distance to full precision, of one text."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.evaluation import text_scores
from autoematic_jax.evaluation.bootstrap import mean_interval
from autoematic_jax.evaluation.contenders import Contenders
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.precisions import forced_levels
from autoematic_jax.precisions import parse_precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityOptions:
  """What to measure on a text.

  Attributes:
    context: Tokens of a window; windows do not overlap.
    windows: Windows to take at most.
    skip_windows: Windows to leave out before them, such as those on which
      something was chosen.
    mode: Which of the policy's phases runs the text.
  """

  context: int = 256
  windows: int = 4
  skip_windows: int = 0
  mode: teacher_forcing.Mode = "prefill"


def text_windows(
  model: LanguageModel, text: str, options: QualityOptions
) -> np.ndarray:
  """`[windows, context]` token ids of a text, in order.

  Raises:
    AutoematicError: The text is shorter than one window after those that are
      left out, or a window does not fit the model.
  """
  context = options.context
  smallest = teacher_forcing.DECODE_PREFIX + 2
  if not smallest <= context <= model.config.max_positions:
    raise AutoematicError(
      f"--context {context} must be from {smallest} to the model's"
      f" {model.config.max_positions}"
    )
  ids = model.tokenizer.encode(text)
  skipped = options.skip_windows
  if skipped < 0:
    raise AutoematicError(f"--skip-windows {skipped} must be at least 0")
  count = min(options.windows, len(ids) // context - skipped)
  if count < 1:
    after = f" after {skipped} of them" if skipped else ""
    raise AutoematicError(
      f"the text has {len(ids)} tokens; a window of --context {context}{after}"
      f" needs {context * (skipped + 1)}"
    )
  chosen = ids[skipped * context : (skipped + count) * context]
  return np.asarray(chosen, np.int32).reshape(count, context)


def measure(
  contenders: Contenders,
  windows: np.ndarray,
  precisions: Sequence[str],
  options: QualityOptions,
  journal: Journal,
) -> list[dict[str, Any]]:
  """One row of scores for each precision.

  Args:
    contenders: Who runs each precision; the reference is their `fp32`.
    windows: From `text_windows`.
    precisions: Names as `parse_precision` takes them.
    options: Windows and mode.
    journal: Remembers finished windows.

  Returns:
    Rows for a table or JSON.
  """
  total = len(windows) * len(precisions)
  kept: dict[str, list[dict[str, Any]]] = {name: [] for name in precisions}
  with tqdm(total=total, desc="scoring", unit="window") as progress:
    for index, tokens in enumerate(windows):
      for name, record in _window(
        contenders, index, tokens, precisions, options, journal
      ):
        kept[name].append(record)
        progress.update()
  return [
    {**contenders.describe(name), **_scores(kept[name])} for name in precisions
  ]


def _window(
  contenders, index, tokens, precisions, options, journal
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Records of one window at every precision."""
  tokens = jnp.asarray(tokens)

  @functools.cache
  def run(name, mode):
    """Who runs a precision, its hidden states and bits; each pass once."""
    judged = contenders.of(name)
    forced = forced_levels(judged, parse_precision(name))
    return judged, *teacher_forcing.hidden_states(judged, tokens, forced, mode)

  for name in precisions:
    record = journal.find("text", name, index)
    if record is None:
      record = _score_window(
        tokens, run(name, options.mode), run("fp32", "prefill")
      )
      journal.add("text", name, index, record=record)
    yield name, record


def _score_window(tokens, judged_run, reference_run):
  judged, hidden, bits = judged_run
  reference, reference_hidden, _ = reference_run
  scores = text_scores.score(
    judged.decoder, hidden, reference.decoder, reference_hidden, tokens
  )
  return {
    "nll": scores.nll.tolist(),
    "kl": scores.kl.tolist(),
    "agree": scores.agree.tolist(),
    "bits": float(np.mean(bits)),
  }


def _scores(records):
  """Means over all windows, with bootstrap intervals over windows.

  Windows are independent values: they share no text.
  """
  nll, kl, agree = (
    np.asarray([record[field] for record in records], np.float64)
    for field in ("nll", "kl", "agree")
  )
  return {
    "execution_bits": float(np.mean([record["bits"] for record in records])),
    "perplexity": float(np.exp(nll.mean())),
    "perplexity_interval": np.exp(mean_interval(nll.mean(1))).tolist(),
    "kl_mean": float(kl.mean()),
    "kl_mean_interval": mean_interval(kl.mean(1)).tolist(),
    "kl_p99": float(np.quantile(kl, 0.99)),
    "top1_agreement": float(agree.mean()),
    "tokens": int(nll.size),
    "windows": len(records),
  }


def text_identity(text: str) -> dict[str, Any]:
  """Length and hash of a text, for a report."""
  data = text.encode()
  return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The rows as text."""
  lines = [
    f"{'precision':>12} {'exec bits':>9} {'stored':>7} {'perplexity':>11}"
    f" {'mean KL':>8} {'95% interval':>15} {'p99 KL':>8} {'top-1':>7}"
  ]
  for row in rows:
    low, high = row["kl_mean_interval"]
    lines.append(
      f"{row['precision']:>12} {row['execution_bits']:>9.2f}"
      f" {row['stored_bits']:>7.2f} {row['perplexity']:>11.2f}"
      f" {row['kl_mean']:>8.4f} {f'{low:.4f}-{high:.4f}':>15}"
      f" {row['kl_p99']:>8.3f} {row['top1_agreement']:>7.1%}"
    )
  return "\n".join(lines)
