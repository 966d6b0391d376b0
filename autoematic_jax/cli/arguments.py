"""Arguments and checks that several subcommands share."""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from autoematic_jax.errors import AutoematicError
from autoematic_jax.models.builder import Implementation
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.policy import PolicyConfig


def add_policy(parser: argparse.ArgumentParser) -> None:
  """`--policy` and `--policy-option`: constants of the run-time policy."""
  parser.add_argument(
    "--policy",
    metavar="FILE",
    help="JSON with fields of PolicyConfig that override the checkpoint's",
  )
  parser.add_argument(
    "--policy-option",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    help="overrides one field, as alpha=3 or levels=[4,6]; may be repeated",
  )


def add_implementation(parser: argparse.ArgumentParser) -> None:
  """`--implementation`: what multiplies by quantized weights."""
  parser.add_argument(
    "--implementation",
    choices=get_args(Implementation),
    help=(
      "what multiplies by quantized weights; mosaic_sm90 needs a Hopper GPU,"
      " runs at 4 and 6 bits, and is the default there"
    ),
  )


def add_activation(parser: argparse.ArgumentParser) -> None:
  """How activations are refined: options that lead back to the paper's way."""
  default = ActivationConfig()
  parser.add_argument(
    "--activation-threshold",
    type=float,
    default=default.threshold,
    metavar="X",
    help=(
      "share of its squared norm that the error of four activations must"
      " exceed for them to be refined (default: %(default)s; the paper: 0.003)"
    ),
  )
  parser.add_argument(
    "--disjoint-masks",
    action="store_true",
    help=(
      "leaves activations unrefined where weights are refined, as the paper's"
      " extended-K GEMM must"
    ),
  )
  parser.add_argument(
    "--nearest-base",
    action="store_true",
    help=(
      "refines activations, keys and values from their nearest 4-bit value, as"
      " the paper, even where another comes closer"
    ),
  )


def read_activation(args: argparse.Namespace) -> ActivationConfig:
  """What the options of `add_activation` ask for.

  Raises:
    PrecisionError: The threshold is not in [0, 1).
  """
  return ActivationConfig(
    threshold=args.activation_threshold,
    overlapping=not args.disjoint_masks,
    nearest_base=args.nearest_base,
  )


def add_compilation_cache(parser: argparse.ArgumentParser) -> None:
  """`--compilation-cache DIR`: where compiled programs are kept."""
  parser.add_argument(
    "--compilation-cache",
    metavar="DIR",
    default=str(Path.home() / ".cache" / "autoematic_jax" / "xla"),
    help=(
      "keeps compiled programs for the next run; '' keeps none (default:"
      " ~/.cache/autoematic_jax/xla)"
    ),
  )


def read_text(option: str, file: str) -> str:
  """Text of a file that an option names.

  Raises:
    AutoematicError: The file cannot be read or is not UTF-8.
  """
  try:
    return Path(file).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise AutoematicError(f"{option} {file}: {error}") from error


def read_policy(args: argparse.Namespace, stored: PolicyConfig) -> PolicyConfig:
  """The stored policy with the fields that the options override.

  Args:
    args: Parsed arguments that `add_policy` declared; a single field goes
      before the file's.
    stored: The checkpoint's policy.

  Raises:
    AutoematicError: The file cannot be read or is not a JSON object, or a
      field is unknown or refused.
  """
  fields = {**stored.to_dict(), **_policy_file(args.policy)}
  for option in args.policy_option:
    name, value = _policy_field(option)
    fields[name] = value
  return PolicyConfig.from_dict(fields)


def _policy_file(file):
  if file is None:
    return {}
  try:
    fields = json.loads(Path(file).read_text())
  except (OSError, ValueError) as error:
    raise AutoematicError(f"--policy {file}: {error}") from error
  if not isinstance(fields, dict):
    raise AutoematicError(f"--policy {file}: expected a JSON object")
  return fields


def _policy_field(option):
  """Name and value of a `FIELD=VALUE`, the value of its field's type."""
  name, text = _split_field("--policy-option", option)
  try:
    value = text if _is_text(name) else json.loads(text)
  except ValueError:
    value = None
  return name, _typed("--policy-option", option, name, value)


def policy_values(argument: str, option: str) -> tuple[str, list[Any]]:
  """Name and values of a `FIELD=VALUE[,VALUE...]`.

  Args:
    argument: That the option was given to, for errors.
    option: What was given.

  Raises:
    AutoematicError: The field is unknown or a value not of its type.
  """
  name, text = _split_field(argument, option)
  try:
    values = text.split(",") if _is_text(name) else json.loads(f"[{text}]")
  except ValueError:
    values = [None]
  return name, [_typed(argument, option, name, value) for value in values]


def _split_field(argument, option):
  name, equals, text = option.partition("=")
  known = PolicyConfig().to_dict()
  if not equals or not text or name not in known:
    raise AutoematicError(
      f"{argument} {option}: expected FIELD=VALUE with a field out of"
      f" {', '.join(known)}"
    )
  return name, text


def _is_text(name):
  return isinstance(PolicyConfig().to_dict()[name], str)


def _typed(argument, option, name, value):
  """The value, once it is of the field's type."""
  example = PolicyConfig().to_dict()[name]
  kind = type(example)
  if kind is float and type(value) is int:
    value = float(value)
  numbers = value if isinstance(value, list) else []
  if type(value) is not kind or any(type(n) is not int for n in numbers):
    raise AutoematicError(
      f"{argument} {option}: {name} takes a value like {example!r}"
    )
  return value
