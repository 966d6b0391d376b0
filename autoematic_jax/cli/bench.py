"""`autoematic bench`: measurements of speed."""

import argparse

import jax
from tqdm import tqdm

from autoematic_jax import reporting
from autoematic_jax.cli import arguments
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import decode_speed
from autoematic_jax.evaluation import environment
from autoematic_jax.evaluation import kernel_plot
from autoematic_jax.evaluation import kernels
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation import speed
from autoematic_jax.evaluation import synthetic
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
  products = kinds.add_parser(
    "kernels", help="the mixed-precision GEMM against bf16, by shape and form"
  )
  known = ", ".join(kernels.SHAPES)
  products.add_argument(
    "--shapes",
    metavar="NAMES",
    help=f"comma separated, of {known} (default: qwen3-8b,llama-70b on a GPU,"
    " else small)",
  )
  products.add_argument(
    "--rows",
    default="1,8,16,64",
    metavar="M,...",
    help="rows of activations (default: %(default)s)",
  )
  products.add_argument(
    "--forms",
    default=",".join(kernels.FORMS),
    metavar="FORM,...",
    help="comma separated (default: %(default)s)",
  )
  products.add_argument("--repeats", type=int, default=15, metavar="N")
  products.add_argument("--json", metavar="FILE", help="also writes the rows")
  products.add_argument(
    "--plot",
    metavar="PNG",
    help="draws speed against bf16 by rows (needs matplotlib)",
  )
  decode = kinds.add_parser(
    "decode", help="a decode step of large models, with random weights"
  )
  decode.add_argument(
    "--models",
    metavar="NAMES",
    help=f"comma separated, of {', '.join(synthetic.MODELS)} (default:"
    " qwen3-8b on a GPU, else small)",
  )
  decode.add_argument(
    "--precisions",
    default=",".join(decode_speed.PRECISIONS),
    metavar="NAME,...",
    help="comma separated (default: %(default)s); adaptive has 6 bits in two"
    " of five layers",
  )
  for name, default, what in (
    ("--batches", "1", "requests that decode together"),
    ("--contexts", "1024", "tokens in the cache"),
  ):
    decode.add_argument(
      name,
      default=default,
      metavar="N,...",
      help=f"{what} (default: %(default)s)",
    )
  decode.add_argument("--steps", type=int, default=32, metavar="N")
  decode.add_argument("--repeats", type=int, default=5, metavar="N")
  decode.add_argument("--json", metavar="FILE", help="also writes the rows")


def run(args: argparse.Namespace) -> int:
  """Measures, prints a table, writes JSON; returns the exit code."""
  kinds = {"generate": _generate, "kernels": _kernels, "decode": _decode}
  return kinds[args.kind](args)


def _names(option, given, known):
  names = tuple(given.split(","))
  for name in names:
    if name not in known:
      raise AutoematicError(
        f"{option} {name} is unknown; known: {', '.join(known)}"
      )
  return names


def _numbers(option, given):
  numbers = given.split(",")
  if not all(number.isdecimal() and int(number) > 0 for number in numbers):
    raise AutoematicError(f"{option} {given} must be whole numbers >= 1")
  return tuple(map(int, numbers))


def _on_gpu():
  return jax.default_backend() == "gpu"


def _kernels(args):
  shapes = args.shapes or ("qwen3-8b,llama-70b" if _on_gpu() else "small")
  options = kernels.KernelOptions(
    shapes=_names("--shapes", shapes, kernels.SHAPES),
    rows=_numbers("--rows", args.rows),
    forms=_names("--forms", args.forms, kernels.FORMS),
    repeats=_numbers("--repeats", str(args.repeats))[0],
  )
  if args.plot:
    reporting.require_matplotlib()
    if "bf16" not in options.forms:
      raise AutoematicError(
        "--plot shows speed against bf16: add it to --forms"
      )
  limits = kernels.limits()
  print(
    f"products by {synthetic.implementation()}; limits here:"
    f" {limits['tb_per_s']:.2f} TB/s, {limits['bf16_tflops']:.1f} TFLOP/s"
  )
  tqdm.write(kernels.HEADER)
  found = []
  for row in kernels.measure_all(options, limits):
    found.append(row)
    tqdm.write(kernels.line(row))
    if args.json:
      reports.write(args.json, found, limits=limits)
  if args.plot:
    machine = environment.machine()["device"]
    kernel_plot.draw(
      found, f"{synthetic.implementation()} on {machine}", args.plot
    )
    print(f"drawn to {args.plot}")
  return 0


def _decode(args):
  models = args.models or ("qwen3-8b" if _on_gpu() else "small")
  options = decode_speed.DecodeOptions(
    models=_names("--models", models, synthetic.MODELS),
    precisions=_names("--precisions", args.precisions, decode_speed.PRECISIONS),
    batches=_numbers("--batches", args.batches),
    contexts=_numbers("--contexts", args.contexts),
    steps=_numbers("--steps", str(args.steps))[0],
    repeats=_numbers("--repeats", str(args.repeats))[0],
  )
  print(f"products by {synthetic.implementation()}")
  tqdm.write(decode_speed.HEADER)
  found = []
  for row in decode_speed.measure_all(options):
    found.append(row)
    tqdm.write(decode_speed.line(row))
    if args.json:
      reports.write(args.json, found)
  for name in options.models:
    for batch in options.batches:
      alone = decode_speed.signals_us(name, batch)
      tqdm.write(f"signals alone, {name}, batch {batch}: {alone:.0f} us a step")
  return 0


def _generate(args):
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
