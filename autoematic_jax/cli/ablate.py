"""`autoematic ablate`: what each constant of the policy changes."""

import argparse

from autoematic_jax import reporting
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import reports as json_reports
from autoematic_jax.evaluation.policies import ablation
from autoematic_jax.evaluation.policies import ablation_plot
from autoematic_jax.evaluation.policies import signal_reports


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument(
    "reports",
    nargs="+",
    metavar="REPORT",
    help="what autoematic policies --json wrote; several count the same",
  )
  parser.add_argument(
    "--grid",
    nargs="+",
    metavar="FIELD=VALUE,VALUE",
    help=(
      "tries every combination of these values, as alpha=2,4 levels=[4,6],[6];"
      " without it one constant is changed at a time"
    ),
  )
  parser.add_argument(
    "--max-under",
    type=float,
    default=0.01,
    metavar="SHARE",
    help=(
      "of layer executions below the oracle's level, at most, in the setting"
      " that is chosen: the one of the lowest bits (default: %(default)s)"
    ),
  )
  parser.add_argument(
    "--kind",
    choices=ablation.PARTS,
    default="all",
    help="of pass by which a setting is chosen (default: %(default)s)",
  )
  parser.add_argument("--json", metavar="FILE", required=True)
  parser.add_argument(
    "--plot",
    metavar="PNG",
    help="draws shares below the oracle against bits (needs matplotlib)",
  )
  arguments.add_compilation_cache(parser)


def run(args: argparse.Namespace) -> int:
  """Replays settings, prints a table, writes JSON; returns the exit code."""
  if not 0 <= args.max_under <= 1:
    raise AutoematicError(f"--max-under {args.max_under} must be in [0, 1]")
  if args.plot:
    reporting.require_matplotlib()
  enable_compilation_cache(args.compilation_cache)
  reports = [signal_reports.read(file) for file in args.reports]
  ablation.check_halves(reports)
  results = ablation.measure(reports, _settings(args.grid, reports))
  chosen = ablation.choose(results, max_under=args.max_under, part=args.kind)
  print(ablation.table(results))
  print(
    "under and over: share of layer executions below and above the oracle's"
    " level; replayed, as if levels did not change the signals"
  )
  print(_verdict(results[0], chosen, args))
  json_reports.write(
    args.json,
    [
      {"setting": result.setting, "report": report, "scores": scores}
      for result in results
      for report, scores in result.scores.items()
    ],
    max_under=args.max_under,
    kind=args.kind,
    chosen=chosen.setting,
  )
  if args.plot:
    ablation_plot.draw(results, chosen, args.plot)
    print(f"settings drawn to {args.plot}")
  return 0


def _settings(options, reports):
  if options is None:
    return ablation.one_at_a_time(reports)
  values = {}
  for option in options:
    field, found = arguments.policy_values("--grid", option)
    if field in values:
      raise AutoematicError(f"--grid {option}: {field} is given twice")
    values[field] = found
  return ablation.grid(values, reports)


def _verdict(recorded, chosen, args):
  """The chosen setting on the half that it was not chosen on, as text."""
  before = chosen.mean("first", args.kind)
  kept = before["underprovision"] <= args.max_under
  lines = [
    f"chosen on one half of the conversations: {chosen.name}"
    f" (under {before['underprovision']:.1%}"
    + (")" if kept else f"; none keeps {args.max_under:.1%})"),
    f"on the other half {'bits':>9} {'under':>6} {'over':>6}",
  ]
  for label, result in (("recorded", recorded), ("chosen", chosen)):
    rates = result.mean("second", args.kind)
    lines.append(f"  {label:19} {ablation.rates_text(rates)}")
  return "\n".join(lines)
