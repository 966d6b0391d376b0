"""`autoematic policies`: levels that policies choose, beside the oracle's."""

import argparse
import dataclasses

import autoematic_jax
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import quality
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.policies import comparison
from autoematic_jax.evaluation.policies import oracle
from autoematic_jax.evaluation.policies import scores
from autoematic_jax.evaluation.policies import traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument("checkpoint", help="directory made by autoematic convert")
  parser.add_argument(
    "--baseline",
    metavar="DIR",
    required=True,
    help="unquantized checkpoint of the same model",
  )
  parser.add_argument(
    "--oracle",
    metavar="FILE",
    required=True,
    help="what autoematic oracle --json wrote",
  )
  parser.add_argument("--json", metavar="FILE", required=True)
  static = parser.add_argument_group("a fixed level for each layer")
  static.add_argument(
    "--calibrate",
    metavar="TEXT",
    help=(
      "text on which each layer's sensitivity is measured; without it no fixed"
      " assignment is compared"
    ),
  )
  static.add_argument("--context", type=int, default=256, metavar="N")
  static.add_argument("--windows", type=int, default=2, metavar="N")
  parser.add_argument(
    "--seed", type=int, default=0, help="of the random policy"
  )
  parser.add_argument(
    "--resume",
    metavar="FILE",
    help="keeps finished conversations here and goes on from them",
  )
  arguments.add_policy(parser)
  arguments.add_activation(parser)
  arguments.add_compilation_cache(parser)


def run(args: argparse.Namespace) -> int:
  """Scores policies, prints a table, writes JSON; returns the exit code."""
  if args.windows < 1:
    raise AutoematicError(f"--windows {args.windows} must be >= 1")
  if args.seed < 0:
    raise AutoematicError(f"--seed {args.seed} must be >= 0")
  text = None
  if args.calibrate is not None:
    text = arguments.read_text("--calibrate", args.calibrate)
  report = traces.read(args.oracle)
  enable_compilation_cache(args.compilation_cache)
  judged = autoematic_jax.load(
    args.checkpoint, activation=arguments.read_activation(args)
  )
  judged = judged.with_policy(arguments.read_policy(args, judged.policy))
  baseline = autoematic_jax.load(args.baseline, compute_dtype="float32")
  oracle.check(judged, baseline)
  traces.check(report, judged)
  windows = None
  if text is not None:
    options = quality.QualityOptions(context=args.context, windows=args.windows)
    windows = quality.text_windows(judged, text, options)
  subject = {
    "checkpoint": args.checkpoint,
    "baseline": args.baseline,
    "oracle": {"file": args.oracle, "budget": report["budget"]},
    "conversations": quality.text_identity(str(report["rows"])),
    "policy": judged.policy.to_dict(),
    "activation": dataclasses.asdict(judged.activation),
    "seed": args.seed,
    "calibration": None,
  }
  if text is not None:
    subject["calibration"] = {
      "context": args.context,
      "windows": args.windows,
      **quality.text_identity(text),
    }
  rows, signals = comparison.measure(
    comparison.Comparison(
      judged=judged,
      baseline=baseline,
      rows=report["rows"],
      journal=Journal(args.resume, subject),
    ),
    windows,
    args.seed,
  )
  print(scores.table(rows))
  print(
    "under and over: share of layer executions below and above the oracle's"
    f" level (budget {report['budget']:g} nats)"
  )
  reports.write(args.json, rows, **subject, signals=signals)
  return 0
