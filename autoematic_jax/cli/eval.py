"""`autoematic eval`: accuracy of a checkpoint, by precision."""

import argparse

import autoematic_jax
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import quality
from autoematic_jax.evaluation import reports
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.precisions import DENSE_DTYPES
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
  reference = _reference(args)
  precisions = _precisions(args.precisions, model)
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
  journal = quality.Journal(args.resume, subject)
  rows = quality.measure(
    model, reference, windows, precisions, options, journal
  )
  print(quality.table(rows))
  print(f"KL and top-1 against {_name(args, reference)}")
  if args.json:
    reports.write(args.json, rows, **subject)
  return 0


def _reference(args) -> LanguageModel:
  source = args.baseline or args.checkpoint
  return autoematic_jax.load(
    source, compute_dtype="float32", dense=args.baseline is None
  )


def _name(args, reference):
  if args.baseline is None:
    return "this checkpoint's own weights, dequantized and run in float32"
  return f"{args.baseline} ({reference.format}), run in float32"


def _precisions(text, model):
  """Names that the model offers, checked before anything is measured."""
  if text is None:
    return ["fp32", *map(str, model.precisions)]
  names = text.split(",")
  for name in names:
    if name in DENSE_DTYPES and name != "fp32":
      raise AutoematicError(f"--precisions {name}: the reference is fp32")
    parse_precision(name)
  return names
