"""`autoematic bench`: measurements of speed."""

import argparse

from autoematic_jax.cli import arguments
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation import speed
from autoematic_jax.precisions import parse_precision


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares one nested subcommand for each kind of benchmark."""
  kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
  generate = kinds.add_parser(
    "generate", help="prefill and decode of a checkpoint, by precision"
  )
  generate.add_argument("checkpoint")
  generate.add_argument(
    "--baseline",
    metavar="DIR",
    help="unquantized checkpoint (default: the weights dequantized)",
  )
  generate.add_argument("--prompt-tokens", type=int, default=256, metavar="N")
  generate.add_argument("--new-tokens", type=int, default=64, metavar="N")
  generate.add_argument("--repeats", type=int, default=5, metavar="N")
  generate.add_argument("--batch", type=int, default=1, metavar="N")
  generate.add_argument(
    "--precisions",
    default="fp32,bf16,4,6,adaptive",
    help="comma separated (default: %(default)s)",
  )
  generate.add_argument("--json", metavar="FILE", help="also writes the rows")
  arguments.add_compilation_cache(generate)


def run(args: argparse.Namespace) -> int:
  """Measures, prints a table, writes JSON; returns the exit code."""
  for name in ("prompt_tokens", "new_tokens", "repeats", "batch"):
    if getattr(args, name) < 1:
      option = "--" + name.replace("_", "-")
      raise AutoematicError(f"{option} {getattr(args, name)} must be >= 1")
  if args.new_tokens < 2:
    raise AutoematicError("--new-tokens must be >= 2 to time decode steps")
  precisions = args.precisions.split(",")
  for precision in precisions:
    parse_precision(precision)
  options = speed.SpeedOptions(
    checkpoint=args.checkpoint,
    baseline=args.baseline,
    prompt_tokens=args.prompt_tokens,
    new_tokens=args.new_tokens,
    repeats=args.repeats,
    batch=args.batch,
    compilation_cache=args.compilation_cache,
  )
  rows = speed.measure_all(options, precisions)
  print(speed.table(rows))
  if args.json:
    reports.write(args.json, rows)
  return 0
