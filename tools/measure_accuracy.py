"""Converts a model by several recipes and measures what each costs.

    python tools/measure_accuracy.py --model reference \
      --source models/reference/checkpoint \
      --calibrate wiki.txt --text sample.txt --tasks reference \
      --work build/accuracy --json benchmarks/accuracy.json

Checkpoints in the working folder are used again. Rows of other models that the
JSON file holds are kept.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.evaluation import reports

_CALIBRATED = ["--format", "autofp6", "--calibrate", "TEXT"]
_EVEN = [*_CALIBRATED, "--even-refinement"]
_NO_CORRECTION = [*_EVEN, "--sweeps", "0", "--no-correction"]
_FIXED = [*_NO_CORRECTION, "--decoding", "fixed"]
_APART = ["--disjoint-masks"]
_PAPER = [*_APART, "--nearest-base", "--activation-threshold", "0.003"]

# Checkpoint and how it is made.
CHECKPOINTS = {
  "fp32": ["--format", "fp32"],
  "bf16": ["--format", "bf16"],
  "nvfp4": ["--format", "nvfp4"],
  "fp6g": ["--format", "fp6g"],
  "rtn": ["--format", "autofp6"],
  "paper": [*_FIXED, "--no-scale-search"],
  "scale": _FIXED,
  "step": _NO_CORRECTION,
  "corrected": [*_EVEN, "--sweeps", "0"],
  "swept": _EVEN,
  "apart": [*_CALIBRATED, *_APART],
  "best": _CALIBRATED,
}

# Recipe: checkpoint, precision and options of `autoematic eval`. From
# `autofp6_gptq` to `autofp6_best_disjoint`, each goes one step beyond the last.
RECIPES = {
  "bf16": ("bf16", "bf16", []),
  "nvfp4": ("nvfp4", "4", []),
  "fp6g": ("fp6g", "6", []),
  "autofp6_rtn": ("rtn", "6", _PAPER),
  "autofp6_gptq": ("paper", "6", _PAPER),
  "autofp6_gptq_scales": ("scale", "6", _PAPER),
  "autofp6_gptq_scales_exponent": ("step", "6", _PAPER),
  "autofp6_corrected": ("corrected", "6", _PAPER),
  "autofp6_swept": ("swept", "6", _PAPER),
  "autofp6_spread_disjoint": ("apart", "6", _PAPER),
  "autofp6_any_base_disjoint": (
    "apart",
    "6",
    [*_APART, "--activation-threshold", "0.003"],
  ),
  "autofp6_best_disjoint": ("apart", "6", _APART),
  "autofp6_best": ("best", "6", []),
  "autofp6_best_at_4": ("best", "4", []),
  "adaptive": ("best", "adaptive", []),
}

# Recipes that answer the tasks, too.
WITH_TASKS = (
  "bf16",
  "nvfp4",
  "fp6g",
  "autofp6_rtn",
  "autofp6_gptq",
  "autofp6_best_disjoint",
  "autofp6_best",
  "autofp6_best_at_4",
  "adaptive",
)


def main() -> None:
  """Measures recipe after recipe, saving each."""
  args = _arguments()
  args.work.mkdir(parents=True, exist_ok=True)
  _converted(args, "fp32")
  for recipe in args.recipes:
    checkpoint, precision, options = RECIPES[recipe]
    tasks = args.tasks if recipe in WITH_TASKS else None
    path = _converted(args, checkpoint)
    row = _evaluate(args, path, precision, options, tasks)
    reports.merge(
      args.json,
      [{"model": args.model, "precision": recipe, **row}],
      model=args.model,
      keys=("model", "precision"),
      command=shlex.join(["python", *sys.argv]),
    )
    print(recipe, json.dumps(row), flush=True)


def _converted(args, name: str) -> Path:
  """The checkpoint of a recipe, made if it is not there."""
  path = args.work / f"{args.model}-{name}"
  if not path.exists():
    options = [
      str(args.calibrate) if o == "TEXT" else o for o in CHECKPOINTS[name]
    ]
    if "autofp6" in options:
      options += ["--levels", "4,6"]
    if "--calibrate" in options:
      options += ["--calibration-samples", str(args.samples)]
    _autoematic("convert", args.source, path, "--quiet", *options)
  return path


def _evaluate(args, checkpoint, precision, options, tasks):
  """The measured row, under the names of the report."""
  out = args.work / "row.json"
  words = ["eval", checkpoint, "--precisions", precision, "--json", out]
  words += ["--baseline", args.work / f"{args.model}-fp32", *options]
  words += ["--text", args.text, "--context", 512, "--windows", args.windows]
  words += ["--skip-windows", args.skip_windows]
  if tasks:
    words += ["--tasks", tasks, "--task-batch", 32]
  if tasks and args.limit:
    words += ["--limit", args.limit]
  _autoematic(*words)
  (row,) = json.loads(out.read_text())["rows"]
  kept = ("score", "low", "high", "n", "execution_bits")
  return {
    # Of what was converted: the row of bf16 is that of the baseline.
    "stored_bits": load_checkpoint(checkpoint).stored_bits,
    "execution_bits": row["execution_bits"],
    "ppl": row["perplexity"],
    "kl_mean": row["kl_mean"],
    "kl_p99": row["kl_p99"],
    "top1_agreement": row["top1_agreement"],
    "tasks": {
      name: {key: task[key] for key in kept}
      for name, task in row.get("tasks", {}).items()
    },
  }


def _autoematic(*words) -> None:
  command = [sys.executable, "-m", "autoematic_jax.cli.main", *map(str, words)]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  add = parser.add_argument
  add("--model", required=True, help="its name in the report")
  add("--source", type=Path, required=True)
  add("--calibrate", type=Path, required=True, metavar="TEXT")
  add("--samples", type=int, default=128, help="of 512 tokens, to calibrate on")
  add("--text", type=Path, required=True, help="to measure KL on")
  add("--windows", type=int, default=16, help="of 512 tokens")
  add("--skip-windows", type=int, default=0, help="leave out the first ones")
  add("--tasks", help="as `autoematic eval` takes them")
  add("--limit", type=int, help="items of each task")
  add("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
  add("--work", type=Path, required=True, help="folder of checkpoints")
  add("--json", type=Path, required=True)
  return parser.parse_args()


if __name__ == "__main__":
  main()
