"""`autoematic eval`: accuracy of a checkpoint, by precision."""

import argparse
import dataclasses
from pathlib import Path

import autoematic_jax
from autoematic_jax import reporting
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import plot
from autoematic_jax.evaluation import quality
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation.contenders import Contenders
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.tasks import catalog
from autoematic_jax.evaluation.tasks import runner
from autoematic_jax.evaluation.tasks import scoring


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument("checkpoint", help="directory made by autoematic convert")
  parser.add_argument(
    "--baseline",
    metavar="DIR",
    help=(
      "unquantized checkpoint of the same model, which runs fp32 and bf16"
      " (default: the checkpoint's own weights, dequantized, as fp32)"
    ),
  )
  parser.add_argument(
    "--precisions",
    help="comma separated (default: fp32 and all that the checkpoint offers)",
  )
  _add_text_arguments(parser)
  _add_task_arguments(parser)
  parser.add_argument("--json", metavar="FILE", help="also writes the rows")
  parser.add_argument(
    "--plot",
    metavar="PNG",
    help="draws accuracy by execution bits (needs matplotlib)",
  )
  parser.add_argument(
    "--resume",
    metavar="FILE",
    help="keeps finished windows and items here and goes on from them",
  )
  arguments.add_policy(parser)
  arguments.add_activation(parser)
  arguments.add_compilation_cache(parser)


def _add_text_arguments(parser):
  text = parser.add_argument_group("a text")
  text.add_argument(
    "--text", metavar="FILE", help="measures perplexity and KL on it"
  )
  text.add_argument("--context", type=int, default=256, metavar="N")
  text.add_argument("--windows", type=int, default=4, metavar="N")
  text.add_argument(
    "--skip-windows",
    type=int,
    default=0,
    metavar="N",
    help="leaves out the first ones, such as those that options were chosen on",
  )
  text.add_argument(
    "--mode",
    choices=["prefill", "decode"],
    default="prefill",
    help="run the text in one pass, or token by token as generation would",
  )


def _add_task_arguments(parser):
  tasks = parser.add_argument_group("tasks with answers")
  tasks.add_argument(
    "--tasks",
    metavar="NAME[,NAME...]",
    help=f"out of {', '.join(catalog.NAMES)}",
  )
  tasks.add_argument(
    "--task-file",
    metavar="FILE",
    help=(
      "a task of your own: JSON lines with prompt and answer, or with context,"
      " choices and expected_index"
    ),
  )
  tasks.add_argument(
    "--limit",
    type=int,
    metavar="N",
    help="first N items of each (default: all)",
  )
  tasks.add_argument(
    "--task-batch",
    type=int,
    default=16,
    metavar="N",
    help="answers written at once (default: %(default)s)",
  )
  tasks.add_argument(
    "--allow-code-execution",
    action="store_true",
    help="lets humaneval run what the model writes, with your rights",
  )


def run(args: argparse.Namespace) -> int:
  """Measures, prints tables, writes JSON; returns the exit code."""
  _check_numbers(args)
  if args.plot:
    reporting.require_matplotlib()
  text, tasks = _text(args), _tasks(args)
  if text is None and not tasks:
    raise AutoematicError("give --text, --tasks or --task-file")
  enable_compilation_cache(args.compilation_cache)
  activation = arguments.read_activation(args)
  model = autoematic_jax.load(args.checkpoint, activation=activation)
  model = model.with_policy(arguments.read_policy(args, model.policy))
  contenders = Contenders(model, args.checkpoint, args.baseline)
  precisions = _precisions(args.precisions, contenders)
  subject = _subject(args, model, text, tasks)
  rows = _measure(args, contenders, precisions, text, tasks, subject)
  if args.json:
    reports.write(args.json, rows, **subject, limit=args.limit)
  if args.plot:
    plot.draw(rows, Path(args.checkpoint).resolve().name, args.plot)
    print(f"accuracy drawn to {args.plot}")
  return 0


def _measure(args, contenders, precisions, text, tasks, subject):
  """Rows of what was asked for; prints each table once it is there."""
  quality_options = quality.QualityOptions(
    context=args.context,
    windows=args.windows,
    skip_windows=args.skip_windows,
    mode=args.mode,
  )
  options = runner.TaskOptions(limit=args.limit, batch=args.task_batch)
  # What cannot run is refused before anything is measured or written.
  windows = None
  if text is not None:
    windows = quality.text_windows(contenders.model, text, quality_options)
  runner.check(tasks, contenders.model, options)
  journal = Journal(args.resume, subject)
  if windows is None:
    rows = [contenders.describe(name) for name in precisions]
  else:
    rows = quality.measure(
      contenders, windows, precisions, quality_options, journal
    )
    print(quality.table(rows))
    print(f"KL and top-1 against {_reference_name(args, contenders)}")
  if tasks:
    records = runner.measure(tasks, contenders, precisions, options, journal)
    scoring.add_to_rows(rows, records)
    print(scoring.table(rows))
  return rows


def _check_numbers(args):
  for name in ("windows", "limit", "task_batch"):
    value = getattr(args, name)
    if value is not None and value < 1:
      option = "--" + name.replace("_", "-")
      raise AutoematicError(f"{option} {value} must be >= 1")


def _text(args):
  if args.text is None:
    return None
  return arguments.read_text("--text", args.text)


def _tasks(args):
  names = args.tasks.split(",") if args.tasks else []
  tasks = catalog.load(names, allow_code=args.allow_code_execution)
  if args.task_file:
    tasks.append(catalog.load_file(args.task_file))
  return tasks


def _subject(args, model, text, tasks):
  """What is measured: a report says it, a journal insists on it."""
  subject = {
    "checkpoint": args.checkpoint,
    "baseline": args.baseline,
    "policy": model.policy.to_dict(),
    "activation": dataclasses.asdict(model.activation),
    "tasks": runner.identities(tasks),
  }
  if text is None:
    return subject
  return {
    **subject,
    "context": args.context,
    "skip_windows": args.skip_windows,
    "mode": args.mode,
    "text": quality.text_identity(text),
  }


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
  return names
