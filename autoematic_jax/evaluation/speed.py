"""Speed of generation at several precisions, one process each."""

import dataclasses
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tqdm import tqdm

import autoematic_jax
from autoematic_jax import reporting
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import PrecisionError
from autoematic_jax.evaluation import environment
from autoematic_jax.precisions import DENSE_DTYPES
from autoematic_jax.precisions import parse_precision

PASSAGE = (
  "The harbour woke before the town did. Crates of oranges came off the"
  " first boat, then sacks of flour, and a piano wrapped in sailcloth that"
  " nobody had ordered. The clerk wrote each of them down in a ledger whose"
  " pages smelled of salt. By nine the market was loud: a woman sold bread"
  " by weight, a boy sold string by the yard, and two brothers argued about"
  " the price of a lamp that had belonged to their aunt. In the afternoon"
  " the wind turned, the boats swung round at their moorings, and the"
  " lighthouse keeper counted them as he did every day: eleven, twelve,"
  " thirteen, and one that was not there yesterday. "
)
"""Text of the prompt, repeated to the length asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedOptions:
  """What to measure.

  Attributes:
    checkpoint: A converted checkpoint with several levels.
    baseline: An unquantized checkpoint of the same model; None runs the
      checkpoint's own weights dequantized, which costs the same.
    prompt_tokens: Length of the prompt.
    new_tokens: Tokens to generate.
    repeats: Runs after the one that compiles; the median counts.
    batch: Equal prompts side by side.
    compilation_cache: Directory of compiled programs, or ''.
  """

  checkpoint: str
  baseline: str | None = None
  prompt_tokens: int = 256
  new_tokens: int = 64
  repeats: int = 5
  batch: int = 1
  compilation_cache: str = ""


def measure_all(
  options: SpeedOptions, precisions: list[str]
) -> list[dict[str, Any]]:
  """One row for each precision, each measured in a fresh process.

  Raises:
    AutoematicError: What a measurement raised.
  """
  rows = []
  context = multiprocessing.get_context("spawn")
  for precision in tqdm(precisions, desc="measuring", unit="precision"):
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
      rows.append(pool.submit(measure, options, precision).result())
  return rows


def measure(options: SpeedOptions, precision: str) -> dict[str, Any]:
  """Speed, compile time and memory of one precision in this process."""
  enable_compilation_cache(options.compilation_cache)
  model = _load(options, precision)
  prompt = _prompt(model, options.prompt_tokens)

  def run():
    return autoematic_jax.generate(
      model,
      [prompt] * options.batch,
      max_new_tokens=options.new_tokens,
      precision=parse_precision(precision),
      ignore_eos=True,
    )

  first = run()
  results = [run() for _ in range(options.repeats)]
  bits = reporting.execution_bits(first)
  tokens = options.prompt_tokens * options.batch
  return {
    "model": options.checkpoint,
    "precision": precision,
    "batch": options.batch,
    "prompt_tokens": options.prompt_tokens,
    "new_tokens": options.new_tokens,
    "prefill_tokens_per_s": tokens
    / statistics.median(r.time_to_first_token for r in results),
    "decode_tokens_per_s": statistics.median(
      r.decode_tokens_per_second for r in results
    ),
    "compile_s": first.compile_seconds,
    "peak_rss_mb": environment.peak_rss_mb(),
    "execution_bits": bits["decode"],
    "prefill_execution_bits": bits["prefill"],
    "weights": model.format,
  }


def _load(options, precision):
  dtype = DENSE_DTYPES.get(precision)
  if dtype is None:
    return autoematic_jax.load(options.checkpoint)
  source = options.baseline or options.checkpoint
  return autoematic_jax.load(
    source, compute_dtype=dtype, dense=options.baseline is None
  )


def _prompt(model, length):
  ids = model.tokenizer.encode(PASSAGE)
  if length >= model.config.max_positions:
    raise PrecisionError(
      f"--prompt-tokens {length} leaves no room in the model's context of"
      f" {model.config.max_positions}"
    )
  return (ids * (length // len(ids) + 1))[:length]


def table(rows: list[dict[str, Any]]) -> str:
  """The rows as text, with ratios to fp32 of the same run."""
  base = next((row for row in rows if row["precision"] == "fp32"), None)
  header = (
    f"{'precision':>10} {'prefill tok/s':>14} {'x fp32':>7}"
    f" {'decode tok/s':>13} {'x fp32':>7} {'bits':>6} {'compile s':>10}"
    f" {'peak MB':>8}"
  )
  lines = [header]
  for row in rows:
    ratios = ["", ""]
    if base:
      ratios = [
        f"{row[name] / base[name]:.2f}"
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s")
      ]
    lines.append(
      f"{row['precision']:>10} {row['prefill_tokens_per_s']:>14.1f}"
      f" {ratios[0]:>7} {row['decode_tokens_per_s']:>13.2f}"
      f" {ratios[1]:>7} {row['execution_bits'] or 0:>6.2f}"
      f" {row['compile_s']:>10.1f} {row['peak_rss_mb']:>8.0f}"
    )
  return "\n".join(lines)
