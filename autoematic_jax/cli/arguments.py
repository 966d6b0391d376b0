"""Arguments and checks that several subcommands share."""

import argparse
import json
from pathlib import Path

import jax

from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.policy import PolicyConfig

DENSE = {"fp32": "float32", "bf16": "bfloat16"}


def add_policy(parser: argparse.ArgumentParser) -> None:
  """`--policy FILE`: constants of the run-time policy."""
  parser.add_argument(
    "--policy",
    metavar="FILE",
    help="JSON with fields of PolicyConfig that override the checkpoint's",
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


def enable_compilation_cache(directory: str) -> None:
  """Makes JAX keep every compiled program in `directory`."""
  if not directory:
    return
  jax.config.update("jax_compilation_cache_dir", directory)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def read_policy(file: str | None, stored: PolicyConfig) -> PolicyConfig:
  """The stored policy with the fields that a JSON file overrides.

  Raises:
    AutoematicError: The file cannot be read or is not a JSON object.
  """
  if file is None:
    return stored
  try:
    fields = json.loads(Path(file).read_text())
  except (OSError, ValueError) as error:
    raise AutoematicError(f"--policy {file}: {error}") from error
  if not isinstance(fields, dict):
    raise AutoematicError(f"--policy {file}: expected a JSON object")
  return PolicyConfig.from_dict({**stored.to_dict(), **fields})


def parse_precision(text: str | None) -> str | int | list[int] | None:
  """`adaptive`, `bf16`, `fp32`, one level, or a level for each layer.

  Raises:
    PrecisionError: The text is none of these.
  """
  if text is None or text in ("adaptive", *DENSE):
    return text
  try:
    levels = [int(part) for part in text.split(",")]
  except ValueError:
    raise PrecisionError(
      f"--precision {text!r}: expected adaptive, bf16, fp32, a number of"
      " bits, or one number for each layer separated by commas"
    ) from None
  return levels if "," in text else levels[0]
