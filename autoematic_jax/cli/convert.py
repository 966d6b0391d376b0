"""`autoematic convert`: a model file to a packed checkpoint."""

import argparse
import signal
import time

from autoematic_jax.checkpoints import ConvertOptions
from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import layout
from autoematic_jax.errors import PrecisionError
from autoematic_jax.evaluation import environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument(
      "source", help="GGUF file, or Hugging Face folder with safetensors"
  )
  parser.add_argument("destination", help="directory to write")
  parser.add_argument(
      "--format", default="autofp6", choices=layout.FORMATS
  )
  parser.add_argument(
      "--rho",
      type=float,
      default=0.2,
      help="share of weight subgroups that are refined (default: 0.2)",
  )
  parser.add_argument(
      "--levels",
      help="bits that layers may run at, such as 2,4,6 (default: the format's)",
  )
  parser.add_argument(
      "--decoding",
      default="exponent",
      choices=("exponent", "fixed"),
      help="step of the offsets: the base's exponent, or the paper's 1/8",
  )
  parser.add_argument(
      "--dense-dtype",
      choices=("bfloat16", "float32"),
      help="of embeddings and norms (default: bfloat16)",
  )
  parser.add_argument(
      "--force", action="store_true", help="replaces an existing destination"
  )
  parser.add_argument(
      "--quiet", action="store_true", help="no progress bar"
  )


def run(args: argparse.Namespace) -> int:
  """Converts and reports; returns the exit code."""
  options = ConvertOptions(
      format=args.format,
      rho=args.rho,
      decoding=args.decoding,
      levels=_levels(args.levels),
      dense_dtype=args.dense_dtype,
  )
  # A polite kill cleans up as an interrupt does.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  start = time.perf_counter()
  sizes = convert(
      args.source,
      args.destination,
      options,
      force=args.force,
      progress=not args.quiet,
  )
  seconds = time.perf_counter() - start
  levels = ", ".join(map(str, options.levels)) or "none"
  print(
      f"{args.destination}: {args.format}, levels {levels},"
      f" {sizes.stored_bits:.3f} stored bits a weight,"
      f" {sizes.disk_bytes / 1e6:.1f} MB of weights\n"
      f"converted in {seconds:.1f} s, peak memory"
      f" {environment.peak_rss_mb():.0f} MB"
  )
  return 0


def _levels(text):
  if text is None:
    return None
  try:
    return tuple(int(part) for part in text.split(","))
  except ValueError:
    raise PrecisionError(
        f"--levels {text!r}: expected numbers separated by commas"
    ) from None
