"""`autoematic oracle`: the lowest precision of each layer at each step."""

import argparse
import dataclasses
from pathlib import Path

import autoematic_jax
from autoematic_jax import reporting
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.policies import conversations
from autoematic_jax.evaluation.policies import oracle
from autoematic_jax.evaluation.policies import plot
from autoematic_jax.evaluation.policies import traces


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument("checkpoint", help="directory made by autoematic convert")
  parser.add_argument(
    "--baseline",
    metavar="DIR",
    required=True,
    help="unquantized checkpoint of the same model; it writes the answers",
  )
  told = parser.add_mutually_exclusive_group(required=True)
  told.add_argument(
    "--conversations",
    metavar="FILE",
    help=(
      "JSON lines with turns: texts, or lists of messages with role and"
      " content for the chat template; answers are left out"
    ),
  )
  told.add_argument(
    "--task",
    choices=conversations.TASKS,
    help=(
      "the reference model's held-out problems, alone and three in a row, or"
      " chat, 16 conversations of which half hold results of tools"
    ),
  )
  parser.add_argument(
    "--limit",
    type=int,
    metavar="N",
    help="first N conversations (default: all)",
  )
  parser.add_argument(
    "--levels",
    metavar="BITS[,BITS...]",
    help="to choose from (default: all that the checkpoint holds)",
  )
  parser.add_argument(
    "--budget",
    type=float,
    default=1e-3,
    metavar="NATS",
    help=(
      "KL divergence from full precision's next token that a layer may leave"
      " (default: %(default)s)"
    ),
  )
  parser.add_argument(
    "--max-new-tokens",
    type=int,
    default=128,
    metavar="N",
    help="of an answer (default: %(default)s)",
  )
  parser.add_argument("--json", metavar="FILE", required=True)
  parser.add_argument(
    "--plot", metavar="PNG", help="draws the levels (needs matplotlib)"
  )
  parser.add_argument(
    "--resume",
    metavar="FILE",
    help="keeps finished conversations here and goes on from them",
  )
  arguments.add_activation(parser)
  arguments.add_compilation_cache(parser)


def run(args: argparse.Namespace) -> int:
  """Asks the oracle, prints a table, writes JSON; returns the exit code."""
  _check_numbers(args)
  if args.plot:
    reporting.require_matplotlib()
  told = _conversations(args)[: args.limit]
  enable_compilation_cache(args.compilation_cache)
  judged = autoematic_jax.load(
    args.checkpoint, activation=arguments.read_activation(args)
  )
  baseline = autoematic_jax.load(args.baseline, compute_dtype="float32")
  oracle.check(judged, baseline)
  options = oracle.OracleOptions(
    levels=_levels(args.levels, judged), budget=args.budget
  )
  subject = {
    "checkpoint": args.checkpoint,
    "baseline": args.baseline,
    "levels": list(options.levels),
    "budget": options.budget,
    "max_new_tokens": args.max_new_tokens,
    "activation": dataclasses.asdict(judged.activation),
    "conversations": conversations.identity(told),
  }
  # What does not fit is refused before anything is measured or written.
  for item in told:
    conversations.encode(baseline, item)
  rows = traces.measure(
    judged,
    baseline,
    told,
    options,
    args.max_new_tokens,
    Journal(args.resume, subject),
  )
  summary = traces.summary(rows, options.budget)
  print(traces.table(summary))
  reports.write(args.json, rows, **subject, summary=summary)
  if args.plot:
    name = Path(args.checkpoint).resolve().name
    title = f"{name}: lowest bits within {options.budget:g} nats"
    plot.draw(rows, options.levels, title, args.plot)
    print(f"levels drawn to {args.plot}")
  return 0


def _check_numbers(args):
  for name in ("limit", "max_new_tokens"):
    value = getattr(args, name)
    if value is not None and value < 1:
      option = "--" + name.replace("_", "-")
      raise AutoematicError(f"{option} {value} must be >= 1")
  if not args.budget >= 0:
    raise AutoematicError(f"--budget {args.budget} must be >= 0")


def _conversations(args):
  if args.task:
    return conversations.load_task(args.task)
  return conversations.load_file(Path(args.conversations))


def _levels(text, judged):
  if text is None:
    return judged.levels
  try:
    levels = tuple(sorted(set(map(int, text.split(",")))))
  except ValueError:
    raise AutoematicError(
      f"--levels {text!r}: expected numbers of bits separated by commas"
    ) from None
  if not set(levels) <= set(judged.levels):
    raise AutoematicError(
      f"--levels {text}: the checkpoint holds {judged.levels} only"
    )
  return levels
