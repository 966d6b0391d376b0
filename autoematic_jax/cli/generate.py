"""`autoematic generate`: text from a converted checkpoint."""

import argparse
import json
import sys

import numpy as np

import autoematic_jax
from autoematic_jax import reporting
from autoematic_jax.cli import arguments
from autoematic_jax.compilation_cache import enable_compilation_cache
from autoematic_jax.errors import PromptError
from autoematic_jax.precisions import DENSE_DTYPES
from autoematic_jax.precisions import parse_precision
from autoematic_jax.results import GenerationResult
from autoematic_jax.sampling import SamplingConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument("checkpoint", help="directory made by autoematic convert")
  parser.add_argument(
    "--prompt",
    action="append",
    help="text of the user; give it several times for a batch",
  )
  parser.add_argument(
    "--prompt-file", metavar="FILE", help="reads one prompt from a file"
  )
  parser.add_argument("--system", help="system message before the prompt")
  parser.add_argument(
    "--raw", action="store_true", help="no chat template: continue the text"
  )
  parser.add_argument(
    "--precision",
    help=(
      "adaptive, bits of every layer (2, 4, 6, 8), bits of each layer"
      " separated by commas, bf16 or fp32 (default: adaptive where stored)"
    ),
  )
  parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
  parser.add_argument("--temperature", type=float, default=0.0)
  parser.add_argument("--top-k", type=int, default=0)
  parser.add_argument("--top-p", type=float, default=1.0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--stop-token-id", type=int, action="append", default=[], metavar="ID"
  )
  parser.add_argument("--ignore-eos", action="store_true")
  parser.add_argument(
    "--trace-plot",
    metavar="PNG",
    help="draws the bits of each layer and step (needs matplotlib)",
  )
  parser.add_argument(
    "--json", action="store_true", help="prints one JSON object, no text"
  )
  arguments.add_policy(parser)
  arguments.add_implementation(parser)
  arguments.add_activation(parser)
  arguments.add_compilation_cache(parser)


def run(args: argparse.Namespace) -> int:
  """Loads, generates, prints; returns the exit code."""
  prompts = _prompts(args)
  sampling = SamplingConfig(
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
    seed=args.seed,
  )
  precision = parse_precision(args.precision)
  if args.trace_plot:
    reporting.require_matplotlib()
  enable_compilation_cache(args.compilation_cache)
  model = autoematic_jax.load(
    args.checkpoint,
    compute_dtype=DENSE_DTYPES.get(args.precision),
    activation=arguments.read_activation(args),
    implementation=args.implementation,
    decode_rows=min(64, len(prompts)),
  )
  model = model.with_policy(arguments.read_policy(args, model.policy))
  stream = autoematic_jax.stream(
    model,
    prompts,
    max_new_tokens=args.max_new_tokens,
    precision=precision,
    sampling=sampling,
    stop_token_ids=args.stop_token_id,
    ignore_eos=args.ignore_eos,
  )
  result = _consume(stream, len(prompts), quiet=args.json)
  if args.json:
    print(json.dumps(_as_json(result, model)))
  else:
    print("\n" + reporting.summary(result, model))
  if args.trace_plot:
    reporting.plot_trace(result, model.levels, args.trace_plot)
    if not args.json:
      print(f"trace drawn to {args.trace_plot}")
  return 0


def _prompts(args):
  texts = list(args.prompt or [])
  if args.prompt_file:
    texts.append(arguments.read_text("--prompt-file", args.prompt_file))
  if not texts:
    raise PromptError("give --prompt or --prompt-file")
  for text in texts:
    if not text.strip():
      raise PromptError("a prompt is empty")
  if args.raw:
    if args.system:
      raise PromptError("--system needs the chat template; drop --raw")
    return texts
  system = [{"role": "system", "content": args.system}] if args.system else []
  return [[*system, {"role": "user", "content": text}] for text in texts]


def _consume(stream, count, *, quiet) -> GenerationResult:
  """Prints text as it comes, a batch's requests one after the other."""
  while True:
    try:
      chunk = next(stream)
    except StopIteration as end:
      result = end.value
      break
    if count == 1 and not quiet:
      sys.stdout.write(chunk.text)
      sys.stdout.flush()
  if count > 1 and not quiet:
    for index, text in enumerate(result.texts):
      print(f"[{index}] {text}")
  elif not quiet:
    print()
  return result


def _as_json(result, model):
  """Fields of one prompt as values, of several as lists."""
  one = len(result.texts) == 1
  pick = (lambda values: values[0]) if one else (lambda values: values)
  return {
    "text": pick(result.texts),
    "tokens": pick(result.token_ids),
    "finish_reason": pick(result.finish_reasons),
    "prompt_tokens": pick(result.prompt_tokens),
    "precision_levels": list(model.levels),
    "levels": reporting.level_shares(result),
    "execution_bits": reporting.execution_bits(result),
    "implementation": model.implementation,
    "stored_bits": round(model.stored_bits, 4),
    "trace": np.asarray(result.trace).tolist(),
    "prefill_trace": np.asarray(result.prefill_levels).tolist(),
    "time_to_first_token_s": result.time_to_first_token,
    "decode_tokens_per_s": result.decode_tokens_per_second,
    "compile_s": result.compile_seconds,
  }
