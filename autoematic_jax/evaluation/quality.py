"""Perplexity, and distance to full precision, of one text."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.evaluation import text_scores
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.precisions import DENSE_DTYPES
from autoematic_jax.precisions import forced_levels
from autoematic_jax.precisions import parse_precision

_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityOptions:
  """What to measure on a text.

  Attributes:
    context: Tokens of a window; windows do not overlap.
    windows: Windows to take at most.
    mode: Which of the policy's phases runs the text.
  """

  context: int = 256
  windows: int = 4
  mode: teacher_forcing.Mode = "prefill"


def text_windows(
  model: LanguageModel, text: str, options: QualityOptions
) -> np.ndarray:
  """`[windows, context]` token ids from the beginning of a text.

  Raises:
    AutoematicError: The text is shorter than one window, or a window does not
      fit the model.
  """
  context = options.context
  smallest = teacher_forcing.DECODE_PREFIX + 2
  if not smallest <= context <= model.config.max_positions:
    raise AutoematicError(
      f"--context {context} must be from {smallest} to the model's"
      f" {model.config.max_positions}"
    )
  ids = model.tokenizer.encode(text)
  count = min(options.windows, len(ids) // context)
  if count < 1:
    raise AutoematicError(
      f"the text has {len(ids)} tokens; a window of --context {context} needs"
      " that many"
    )
  return np.asarray(ids[: count * context], np.int32).reshape(count, context)


def measure(
  model: LanguageModel,
  reference: LanguageModel,
  windows: np.ndarray,
  precisions: Sequence[str],
  options: QualityOptions,
  journal: "Journal",
) -> list[dict[str, Any]]:
  """One row of scores for each precision.

  Args:
    model: The checkpoint that is judged.
    reference: The unquantized model.
    windows: From `text_windows`.
    precisions: Names as `parse_precision` takes them; `fp32` runs the
      reference.
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
        model, reference, index, tokens, precisions, options, journal
      ):
        kept[name].append(record)
        progress.update()
  return [_row(name, kept[name], model, reference) for name in precisions]


def _window(
  model, reference, index, tokens, precisions, options, journal
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Records of one window at every precision."""
  tokens = jnp.asarray(tokens)

  @functools.cache
  def run(name, mode):
    """Who runs a precision, its hidden states and bits; each pass once."""
    judged = reference if name in DENSE_DTYPES else model
    forced = forced_levels(judged, parse_precision(name))
    return judged, *teacher_forcing.hidden_states(judged, tokens, forced, mode)

  for name in precisions:
    record = journal.find(name, index)
    if record is None:
      record = _score_window(
        tokens, run(name, options.mode), run("fp32", "prefill")
      )
      journal.add(name, index, record)
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


def _row(name, records, model, reference):
  """Means over all windows, with bootstrap intervals over windows."""
  judged = reference if name in DENSE_DTYPES else model
  nll, kl, agree = (
    np.asarray([record[field] for record in records], np.float64)
    for field in ("nll", "kl", "agree")
  )
  return {
    "precision": name,
    "format": judged.format,
    "execution_bits": float(np.mean([record["bits"] for record in records])),
    "stored_bits": judged.stored_bits,
    "perplexity": float(np.exp(nll.mean())),
    "perplexity_interval": np.exp(_interval(nll.mean(1))).tolist(),
    "kl_mean": float(kl.mean()),
    "kl_mean_interval": _interval(kl.mean(1)).tolist(),
    "kl_p99": float(np.quantile(kl, 0.99)),
    "top1_agreement": float(agree.mean()),
    "tokens": int(nll.size),
    "windows": len(records),
  }


def _interval(values):
  """95% bootstrap interval of a mean over windows; they share no text."""
  rng = np.random.default_rng(0)
  picks = rng.integers(0, len(values), (_RESAMPLES, len(values)))
  return np.quantile(values[picks].mean(1), [0.025, 0.975])


class Journal:
  """Finished windows on disk, so that an interrupted run can go on.

  One JSON object a line. The first names what is measured; a file that names
  something else is refused rather than mixed in.
  """

  def __init__(self, path: str | None, subject: dict[str, Any]):
    self._path = Path(path) if path else None
    self._records: dict[tuple[str, int], dict[str, Any]] = {}
    if self._path is None:
      return
    try:
      if self._path.exists():
        self._read(self._path.read_text(), subject)
      else:
        self._path.write_text(json.dumps(subject) + "\n")
    except OSError as error:
      raise AutoematicError(f"--resume {path}: {error}") from error

  def _read(self, text, subject):
    first, *lines = text.splitlines() or [""]
    if first != json.dumps(subject):
      raise AutoematicError(
        f"--resume {self._path} holds another measurement; name another file"
      )
    for line in lines:
      try:
        record = json.loads(line)
      except ValueError:
        continue  # The line that was being written when the run ended.
      self._records[record["precision"], record["window"]] = record

  def find(self, precision: str, window: int) -> dict[str, Any] | None:
    """What was measured before, if it was."""
    return self._records.get((precision, window))

  def add(self, precision: str, window: int, record: dict[str, Any]) -> None:
    """Keeps one finished window."""
    if self._path is not None:
      line = {"precision": precision, "window": window, **record}
      with self._path.open("a") as file:
        file.write(json.dumps(line) + "\n")


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
