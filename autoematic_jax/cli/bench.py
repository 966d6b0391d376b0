"""`autoematic bench`: measurements of speed."""

import argparse

import jax
from tqdm import tqdm

from autoematic_jax.cli import arguments
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import kernels
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation import speed
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


def run(args: argparse.Namespace) -> int:
  """Measures, prints a table, writes JSON; returns the exit code."""
  return {"generate": _generate, "kernels": _kernels}[args.kind](args)


def _kernels(args):
  shapes = args.shapes
  if shapes is None:
    on_gpu = jax.default_backend() == "gpu"
    shapes = "qwen3-8b,llama-70b" if on_gpu else "small"
  for option, given, known in (
    ("--shapes", shapes, kernels.SHAPES),
    ("--forms", args.forms, kernels.FORMS),
  ):
    for name in given.split(","):
      if name not in known:
        raise AutoematicError(
          f"{option} {name} is unknown; known: {', '.join(known)}"
        )
  rows = args.rows.split(",")
  if args.repeats < 1 or not all(m.isdecimal() and int(m) > 0 for m in rows):
    raise AutoematicError(
      f"--rows {args.rows} and --repeats {args.repeats} must be whole numbers"
      " >= 1"
    )
  options = kernels.KernelOptions(
    shapes=tuple(shapes.split(",")),
    rows=tuple(map(int, rows)),
    forms=tuple(args.forms.split(",")),
    repeats=args.repeats,
  )
  limits = kernels.limits()
  print(
    f"products by {kernels.implementation()}; limits here:"
    f" {limits['tb_per_s']:.2f} TB/s, {limits['bf16_tflops']:.1f} TFLOP/s"
  )
  tqdm.write(kernels.HEADER)
  found = []
  for row in kernels.measure_all(options, limits):
    found.append(row)
    tqdm.write(kernels.line(row))
    if args.json:
      reports.write(args.json, found, limits=limits)
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
