"""The `autoematic` command.

A subcommand is a module of this package with `add_arguments(parser)` and
`run(args) -> int`. Only the module of the subcommand that was asked for is
imported, so that `autoematic --help` need not wait for JAX.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from absl import app
from absl import logging
from absl.flags import argparse_flags

import autoematic_jax
from autoematic_jax.errors import AutoematicError

# A summary for each subcommand; the module has the subcommand's name.
COMMANDS = {
  "convert": "turn a GGUF file or safetensors folder into a checkpoint",
  "inspect": "say what a checkpoint or a model file holds",
  "profile": "find the levels that each layer of a checkpoint bears",
  "generate": "write text from a converted checkpoint",
  "serve": "answer requests over HTTP, with the API of OpenAI",
  "eval": "measure accuracy by precision",
  "bench": "measure speed and memory",
  "oracle": "find the lowest precision that each layer needs at each step",
  "policies": "compare the levels that policies choose with the oracle's",
  "ablate": "vary the policy's constants over recorded signals",
}


def main() -> None:
  """Runs the command line and exits with its code."""
  try:
    app.run(_run, flags_parser=parse_arguments)
  except KeyboardInterrupt:
    print("autoematic: interrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
  """Parses `argv`, whose first element is the program's name."""
  parser = argparse_flags.ArgumentParser(
    prog="autoematic",
    description="Runtime-adaptive mixed-precision LLM inference on JAX.",
    allow_abbrev=False,
  )
  parser.add_argument(
    "--version",
    action="version",
    version=f"%(prog)s {autoematic_jax.__version__}",
  )
  _add_verbose(parser, default=False)
  commands = parser.add_subparsers(
    dest="command",
    metavar="COMMAND",
    required=True,
    parser_class=_SubcommandParser,
  )
  asked = next((word for word in argv[1:] if word in COMMANDS), None)
  for name, summary in COMMANDS.items():
    command = commands.add_parser(
      name, help=summary, description=_sentence(summary)
    )
    if name == asked:
      module = importlib.import_module(f"autoematic_jax.cli.{name}")
      module.add_arguments(command)
      command.set_defaults(run=module.run)
  return parser.parse_args(argv[1:])


class _SubcommandParser(argparse_flags.ArgumentParser):
  """The parser of a subcommand, and of those nested in it.

  The flags of absl go before the subcommand: beneath it, a flag that some
  library defines could clash with an argument.
  """

  def __init__(self, **kwargs):
    super().__init__(inherited_absl_flags=None, allow_abbrev=False, **kwargs)
    # Without a default, so as to leave what stood before the subcommand.
    _add_verbose(self, default=argparse.SUPPRESS)


def _add_verbose(parser: argparse.ArgumentParser, default: bool | str) -> None:
  parser.add_argument(
    "--verbose",
    action="store_true",
    default=default,
    help="show the traceback of an error",
  )


def _sentence(summary: str) -> str:
  return summary[0].upper() + summary[1:] + "."


def _run(args: argparse.Namespace) -> int:
  """Runs the subcommand; turns what a user can act on into one line."""
  # Orbax reports each file that it touches at the level of absl's default.
  logging.set_verbosity(logging.INFO if args.verbose else logging.WARNING)
  try:
    code = args.run(args)
    sys.stdout.flush()
  except AutoematicError as error:
    if args.verbose:
      raise
    message = " ".join(str(error).split())
    print(f"autoematic {args.command}: error: {message}", file=sys.stderr)
    return 1
  except BrokenPipeError:
    # The reader went away, as `head` does. Python would complain once more
    # when it flushes stdout at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
  return code


if __name__ == "__main__":
  main()
