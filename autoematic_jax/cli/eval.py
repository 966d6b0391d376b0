"""`autoematic eval`: accuracy of a checkpoint, by precision."""

import argparse

import autoematic_jax
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import quality
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation.contenders import Contenders
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.precisions import parse_precision


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument("checkpoint", help="directory made by autoematic convert")
  parser.add_argument("--text", metavar="FILE", required=True)
  parser.add_argument(
    "--baseline",
    metavar="DIR",
    help=(
      "unquantized checkpoint of the same model, to which the KL divergence"
      " is taken (default: the checkpoint's own weights, dequantized)"
    ),
  )
  parser.add_argument(
    "--precisions",
    help="comma separated (default: fp32 and all that the checkpoint offers)",
  )
  parser.add_argument("--context", type=int, default=256, metavar="N")
  parser.add_argument("--windows", type=int, default=4, metavar="N")
  parser.add_argument(
    "--mode",
    choices=["prefill", "decode"],
    default="prefill",
    help="run the text in one pass, or token by token as generation would",
  )
  parser.add_argument("--json", metavar="FILE", help="also writes the rows")
  parser.add_argument(
    "--resume",
    metavar="FILE",
    help="keeps finished windows here and goes on from them",
  )
  arguments.add_policy(parser)
  arguments.add_compilation_cache(parser)


def run(args: argparse.Namespace) -> int:
  """Measures, prints a table, writes JSON; returns the exit code."""
  if args.windows < 1:
    raise AutoematicError(f"--windows {args.windows} must be >= 1")
  text = arguments.read_text("--text", args.text)
  enable_compilation_cache(args.compilation_cache)
  model = autoematic_jax.load(args.checkpoint)
  model = model.with_policy(arguments.read_policy(args.policy, model.policy))
  contenders = Contenders(model, args.checkpoint, args.baseline)
  precisions = _precisions(args.precisions, contenders)
  options = quality.QualityOptions(
    context=args.context, windows=args.windows, mode=args.mode
  )
  windows = quality.text_windows(model, text, options)
  subject = {
    "checkpoint": args.checkpoint,
    "baseline": args.baseline,
    "context": args.context,
    "mode": args.mode,
    "policy": model.policy.to_dict(),
    "text": quality.text_identity(text),
  }
  journal = Journal(args.resume, subject)
  rows = quality.measure(contenders, windows, precisions, options, journal)
  print(quality.table(rows))
  print(f"KL and top-1 against {_reference_name(args, contenders)}")
  if args.json:
    reports.write(args.json, rows, **subject)
  return 0


def _reference_name(args, contenders):
  if args.baseline is None:
    return "this checkpoint's own weights, dequantized and run in float32"
  return f"{args.baseline} ({contenders.of('fp32').format}), run in float32"


def _precisions(text, contenders):
  """Names that the model offers, checked before anything is measured."""
  if text is None:
    return list(dict.fromkeys(["fp32", *map(str, contenders.model.precisions)]))
  names = text.split(",")
  for name in names:
    contenders.check(name)
    parse_precision(name)
  return names
