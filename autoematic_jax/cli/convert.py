"""`autoematic convert`: a model file to a packed checkpoint."""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoematic_jax.calibration import SCALE_TARGETS
from autoematic_jax.calibration import Calibrator
from autoematic_jax.calibration import calibration_tokens
from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.checkpoints.source import open_source
from autoematic_jax.cli import arguments
from autoematic_jax.errors import PrecisionError
from autoematic_jax.evaluation import environment
from autoematic_jax.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument(
    "source", help="GGUF file, or Hugging Face folder with safetensors"
  )
  parser.add_argument("destination", help="directory to write")
  parser.add_argument("--format", default="autofp6", choices=layout.FORMATS)
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
    "--policy",
    metavar="JSON",
    help="fields of the policy to store, such as '{\"tau\": 0.2}'",
  )
  parser.add_argument(
    "--calibrate",
    metavar="TEXT",
    help="text file on which weights are chosen by GPTQ (default: rounding)",
  )
  parser.add_argument(
    "--calibration-samples", type=int, default=128, metavar="N"
  )
  parser.add_argument(
    "--calibration-tokens",
    type=int,
    default=512,
    metavar="N",
    help="tokens of a sample (default: 512)",
  )
  parser.add_argument(
    "--no-scale-search",
    action="store_true",
    help="calibration maps the largest weight of a group to 6, as the paper",
  )
  parser.add_argument(
    "--no-correction",
    action="store_true",
    help=(
      "calibration aims at the weights themselves, as the paper, and not at"
      " full-precision outputs"
    ),
  )
  parser.add_argument(
    "--sweeps",
    type=int,
    default=2,
    metavar="N",
    help=(
      "how often calibration chooses all groups again at the end (default: 2;"
      " the paper: 0)"
    ),
  )
  parser.add_argument(
    "--even-refinement",
    action="store_true",
    help=(
      "calibration refines the same share of every layer, as the paper, and"
      " not where errors matter most"
    ),
  )
  parser.add_argument(
    "--disjoint-masks",
    action="store_true",
    help=(
      "calibrate for a GEMM that cannot refine activations where weights are"
      " refined (the paper's form)"
    ),
  )
  parser.add_argument(
    "--force", action="store_true", help="replace an existing checkpoint"
  )
  parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
  """Converts and reports; returns the exit code."""
  start = time.perf_counter()
  calibrator = _calibrator(args)
  with _interrupted_by_sigterm():
    sizes = convert(
      args.source,
      args.destination,
      format=args.format,
      rho=args.rho,
      decoding=args.decoding,
      levels=_levels(args.levels),
      dense_dtype=args.dense_dtype,
      policy=_policy(args.policy),
      calibrator=calibrator,
      force=args.force,
      progress=not args.quiet,
    )
  if calibrator is not None:
    calibrator.finish()
  seconds = time.perf_counter() - start
  checkpoint = load_checkpoint(args.destination)
  what = "quantized weight" if sizes.quantized_weights else "weight"
  lines = {
    "checkpoint": args.destination,
    "format": checkpoint.format,
    "levels": ", ".join(map(str, checkpoint.levels)) or "none",
    "method": checkpoint.metadata["made"]["method"],
    "stored": f"{sizes.stored_bits:.3f} bits per {what}",
    "weights": f"{sizes.disk_bytes / 1e6:.1f} MB",
    "time": f"{seconds:.1f} s",
    "peak memory": f"{environment.peak_rss_mb():.0f} MB",
  }
  for name, value in lines.items():
    print(f"{name:<12} {value}")
  return 0


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
  """A polite kill cleans up as an interrupt does."""
  before = signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def _calibrator(args: argparse.Namespace) -> Calibrator | None:
  if args.calibrate is None:
    return None
  text = arguments.read_text("--calibrate", args.calibrate)
  with tempfile.TemporaryDirectory() as folder:
    for name, content in open_source(args.source).tokenizer_files().items():
      (Path(folder) / name).write_bytes(content)
    tokenizer = Tokenizer.from_dir(Path(folder))
  tokens = calibration_tokens(
    tokenizer, text, args.calibration_samples, args.calibration_tokens
  )
  state_folder = _state_folder(args.destination)
  if state_folder.exists():
    print(f"going on with the calibration in {state_folder}", file=sys.stderr)
  return Calibrator(
    tokens,
    scale_targets=(1.0,) if args.no_scale_search else SCALE_TARGETS,
    sweeps=args.sweeps,
    spread=not args.even_refinement,
    corrected=not args.no_correction,
    overlapping=not args.disjoint_masks,
    state_folder=state_folder,
  )


def _state_folder(destination: str) -> Path:
  """Where an interrupted calibration leaves what it has done."""
  path = Path(destination)
  return path.with_name(f"{path.name}.calibration")


def _levels(text: str | None) -> tuple[int, ...] | None:
  if text is None:
    return None
  try:
    return tuple(int(part) for part in text.split(","))
  except ValueError:
    raise PrecisionError(
      f"--levels {text!r}: expected numbers separated by commas"
    ) from None


def _policy(text: str | None) -> dict[str, Any] | None:
  if text is None:
    return None
  try:
    fields = json.loads(text)
  except ValueError as error:
    raise PrecisionError(f"--policy {text!r} is not JSON: {error}") from None
  if not isinstance(fields, dict):
    raise PrecisionError(f"--policy {text!r} must be a JSON object")
  return fields
