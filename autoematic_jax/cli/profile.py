"""`autoematic profile`: which levels each layer of a checkpoint bears."""

import argparse
import dataclasses

import numpy as np

import autoematic_jax
from autoematic_jax.checkpoints import store_policy
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import quality
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.policies import sensitivity
from autoematic_jax.policy import KNOWN_LEVELS
from autoematic_jax.policy import PolicyConfig

MAX_KL = 0.01
"""Nats by which a layer alone may change the next token's distribution."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument("checkpoint", help="directory made by autoematic convert")
  parser.add_argument(
    "--text",
    metavar="FILE",
    required=True,
    help="text, of a kind that the model will read",
  )
  parser.add_argument(
    "--context",
    type=int,
    default=256,
    metavar="N",
    help="tokens of a window (default: %(default)s)",
  )
  parser.add_argument(
    "--windows",
    type=int,
    default=2,
    metavar="N",
    help="windows to take (default: %(default)s)",
  )
  parser.add_argument(
    "--max-kl",
    type=float,
    default=MAX_KL,
    metavar="NATS",
    help=(
      "what one layer alone may change the next token's distribution by; its"
      " floor is the lowest level within that (default: %(default)s)"
    ),
  )
  parser.add_argument(
    "--highest-floor",
    type=int,
    default=4,
    choices=KNOWN_LEVELS,
    metavar="BITS",
    help=(
      "no floor is higher; 6 keeps layers that matter much at 6 bits always"
      " (default: %(default)s)"
    ),
  )
  parser.add_argument(
    "--resume",
    metavar="FILE",
    help="keeps finished measurements here and goes on from them",
  )
  parser.add_argument(
    "--dry-run", action="store_true", help="leaves the checkpoint as it is"
  )
  arguments.add_activation(parser)
  arguments.add_compilation_cache(parser)


def run(args: argparse.Namespace) -> int:
  """Measures, prints and stores each layer's floor; returns the exit code."""
  if args.windows < 1:
    raise AutoematicError(f"--windows {args.windows} must be >= 1")
  if not args.max_kl >= 0:
    raise AutoematicError(f"--max-kl {args.max_kl} must be >= 0")
  text = arguments.read_text("--text", args.text)
  enable_compilation_cache(args.compilation_cache)
  model = autoematic_jax.load(
    args.checkpoint, activation=arguments.read_activation(args)
  )
  if len(model.levels) < 2:
    raise AutoematicError(
      f"{args.checkpoint} offers {len(model.levels)} levels: there is nothing"
      " for a policy to choose"
    )
  stored = model.policy
  model = model.with_policy(
    dataclasses.replace(stored, levels=model.levels, layer_floors=())
  )
  options = quality.QualityOptions(context=args.context, windows=args.windows)
  windows = quality.text_windows(model, text, options)
  about = {
    "context": args.context,
    "windows": len(windows),
    "activation": dataclasses.asdict(model.activation),
    **quality.text_identity(text),
  }
  journal = Journal(args.resume, {"checkpoint": args.checkpoint, **about})
  costs = sensitivity.measure(model, model, windows, journal)
  floors = sensitivity.floors(
    model.levels, costs, args.max_kl, args.highest_floor
  )
  print(table(model.levels, costs, floors))
  policy = with_floors(stored, model.levels, floors)
  print(
    f"levels {', '.join(map(str, policy.levels))}; floors up to"
    f" {args.highest_floor} bits, where a lower level costs more than"
    f" {args.max_kl:g} nats"
  )
  if not args.dry_run:
    found = {
      **about,
      "max_kl": args.max_kl,
      "highest_floor": args.highest_floor,
      "levels": list(model.levels),
      "kl": costs.tolist(),
    }
    store_policy(args.checkpoint, policy.to_dict(), found)
    print(f"stored in {args.checkpoint}")
  return 0


def with_floors(
  policy: PolicyConfig, levels: tuple[int, ...], floors: list[int]
) -> PolicyConfig:
  """A policy that chooses from the floors up, and no floors that say nothing.

  Args:
    policy: Its other constants.
    levels: That the checkpoint offers.
    floors: Bits of each layer.
  """
  lowest = min(floors)
  offered = tuple(level for level in levels if level >= lowest)
  kept = tuple(floors) if max(floors) > lowest else ()
  return dataclasses.replace(policy, levels=offered, layer_floors=kept)


def table(levels: tuple[int, ...], costs: np.ndarray, floors: list[int]) -> str:
  """KL divergence of each layer at each lower level, and its floor."""
  names = "".join(f" {f'at {level}':>9}" for level in levels[:-1])
  lines = [f"{'layer':>5}{names} {'floor':>5}"]
  for layer, floor in enumerate(floors):
    cells = "".join(f" {kl:>9.5f}" for kl in costs[:-1, layer])
    lines.append(f"{layer:>5}{cells} {floor:>5}")
  cells = "".join(f" {kl:>9.5f}" for kl in costs[:-1].sum(axis=1))
  return "\n".join([*lines, f"{'all':>5}{cells}"])
