"""`autoematic serve`: an HTTP server with OpenAI's API."""

import argparse
import importlib.util
import os
from pathlib import Path

import autoematic_jax
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import AutoematicError

_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument("checkpoint", help="directory made by autoematic convert")
  parser.add_argument("--host", default="127.0.0.1")
  parser.add_argument("--port", type=int, default=8000)
  parser.add_argument(
    "--served-model-name",
    metavar="NAME",
    help="name of the model to clients (default: the directory's)",
  )
  parser.add_argument(
    "--api-key",
    metavar="KEY",
    help="that clients must send (default: $AUTOEMATIC_API_KEY, else none)",
  )
  parser.add_argument(
    "--max-model-len",
    type=int,
    metavar="N",
    help="tokens of a prompt and its answer (default: 2048, or the model's)",
  )
  parser.add_argument(
    "--max-num-seqs",
    type=int,
    default=8,
    metavar="N",
    help="requests in a decode batch (default: %(default)s)",
  )
  parser.add_argument(
    "--max-waiting",
    type=int,
    default=256,
    metavar="N",
    help="requests in the queue before 429 (default: %(default)s)",
  )
  parser.add_argument(
    "--chunk",
    type=int,
    default=128,
    metavar="N",
    help=(
      "tokens of a prefill pass, each a pass of the policy of its own"
      " (default: %(default)s)"
    ),
  )
  parser.add_argument(
    "--max-num-batched-tokens",
    type=int,
    metavar="N",
    help="tokens of a tick (default: a chunk and a full decode batch)",
  )
  parser.add_argument(
    "--kv-pages",
    type=int,
    metavar="N",
    help="KV pages of each layer, of 32 tokens, or 64 at 4 bits (default:"
    " enough for all)",
  )
  parser.add_argument("--no-prefix-cache", action="store_true")
  parser.add_argument(
    "--drain-seconds",
    type=float,
    default=30.0,
    metavar="S",
    help="given to running requests on SIGTERM (default: %(default)s)",
  )
  arguments.add_implementation(parser)
  arguments.add_activation(parser)
  arguments.add_policy(parser)
  arguments.add_compilation_cache(parser)


def run(args: argparse.Namespace) -> int:
  """Serves until a signal; returns the exit code."""
  missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
  if missing:
    raise AutoematicError(
      f"serving needs {', '.join(missing)}: pip install 'autoematic_jax[serve]'"
    )
  # Here, since they need what was just checked.
  from autoematic_jax.serving import server
  from autoematic_jax.serving.app import Api
  from autoematic_jax.serving.config import ServeConfig
  from autoematic_jax.serving.engine import Engine

  enable_compilation_cache(args.compilation_cache)
  model = autoematic_jax.load(
    args.checkpoint,
    implementation=args.implementation,
    activation=arguments.read_activation(args),
  )
  model = model.with_policy(arguments.read_policy(args, model.policy))
  longest = model.config.max_positions
  tokens = args.max_model_len or min(2048, longest)
  if tokens > longest:
    raise AutoematicError(
      f"--max-model-len {tokens}: the model's context is {longest}"
    )
  budget = args.max_num_batched_tokens or args.chunk + args.max_num_seqs
  config = ServeConfig(
    max_tokens=tokens,
    max_running=args.max_num_seqs,
    max_waiting=args.max_waiting,
    chunk=args.chunk,
    token_budget=budget,
    pages=args.kv_pages,
    prefix_cache=not args.no_prefix_cache,
    api_key=args.api_key or os.environ.get("AUTOEMATIC_API_KEY") or None,
    drain_seconds=args.drain_seconds,
  )
  name = args.served_model_name or Path(args.checkpoint).resolve().name
  engine = Engine(model, config)
  server.start(engine)
  server.Server(
    Api(engine, name),
    host=args.host,
    port=args.port,
    announce=lambda url: print(f"{name} at {url}", flush=True),
  ).run()
  return 0
