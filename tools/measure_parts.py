"""Measures what weights, activations and KV cache each cost by themselves.

    python tools/measure_parts.py --model reference --work build/accuracy \
      --text sample.txt --weights nvfp4 fp6g best --json benchmarks/parts.json

One part is quantized and the others stay in full precision: weights as they are
in a checkpoint that `tools/measure_accuracy.py` made, activations and KV cache
by each format.
"""

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import autoematic_jax
from autoematic_jax.evaluation import quality
from autoematic_jax.evaluation import reports
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.evaluation import text_scores
from autoematic_jax.pallas_kernels.activation_quantization import PAPER
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows

LINEARS = ("qkv", "output", "gate_up", "down")

DEFAULT = ActivationConfig()
PAPER_FIXED = dataclasses.replace(PAPER, decoding="fixed")
ANY_BASE = dataclasses.replace(PAPER, nearest_base=False)

# Activations: level, element and how they are refined.
ACTIVATIONS = {
  "nvfp4": (4, "e2m1", DEFAULT),
  "fp6g": (6, "e2m3", DEFAULT),
  "autofp6, paper": (6, "e2m1", PAPER_FIXED),
  "autofp6, exponent step": (6, "e2m1", PAPER),
  "autofp6, any base": (6, "e2m1", ANY_BASE),
  "autofp6, threshold 0.0005": (6, "e2m1", DEFAULT),
}

# KV cache: level, the format whose cache it is, and how it is refined.
CACHES = {
  "nvfp4": (4, "autofp6", DEFAULT),
  "fp6g": (6, "fp6g", DEFAULT),
  "autofp6, paper": (6, "autofp6", PAPER_FIXED),
  "autofp6, exponent step": (6, "autofp6", PAPER),
  "autofp6, any base": (6, "autofp6", DEFAULT),
}


class QuantizedInput(nnx.Module):
  """A projection that reads its input as a format keeps it."""

  def __init__(self, linear, level, element, config):
    self.linear = linear
    self.level = level
    self.element = element
    self.config = config

  def __call__(self, x, precision):
    rows = x.reshape(-1, x.shape[-1])
    levels = jnp.full((rows.shape[0],), self.level, jnp.int32)
    quantized = quantize_rows(
      rows,
      levels,
      config=self.config,
      element=self.element,
      present=(self.level,),
    )
    values = quantized.scaled(quantized.values + quantized.delta)
    values = (values * quantized.tensor_scale)[:, : rows.shape[1]]
    return self.linear(values.reshape(x.shape), precision)


def main() -> None:
  """Prints and writes one row for each part and format."""
  args = _arguments()
  exact = _load(args, f"{args.model}-fp32")
  options = quality.QualityOptions(
    context=512, windows=args.windows, skip_windows=args.skip_windows
  )
  windows = quality.text_windows(exact, args.text.read_text(), options)
  reference = [_hidden(exact, tokens, 0) for tokens in windows]
  cases = [
    ("weights", name, _load(args, f"{args.model}-{name}"), 0)
    for name in args.weights
  ]
  cases += [
    ("activations", name, _reading(exact, *how), 0)
    for name, how in ACTIVATIONS.items()
  ]
  cases += [
    ("kv", name, _remembering(exact, *how), how[0])
    for name, how in CACHES.items()
  ]
  rows = []
  for part, name, model, level in tqdm(cases, unit="case"):
    kl = [
      text_scores.score(
        model.decoder,
        _hidden(model, tokens, level),
        exact.decoder,
        known,
        tokens,
      ).kl
      for tokens, known in zip(windows, reference, strict=True)
    ]
    rows.append(
      {
        "model": args.model,
        "part": part,
        "format": name,
        "kl_mean": float(np.mean(kl)),
      }
    )
  reports.merge(
    args.json,
    rows,
    model=args.model,
    keys=("model",),
    command=shlex.join(["python", *sys.argv]),
  )
  for row in rows:
    print(f"{row['part']:<12} {row['format']:<26} {row['kl_mean']:.4f}")


def _load(args, name):
  return autoematic_jax.load(
    args.work / name, compute_dtype="float32", dense=True
  )


def _reading(model, level, element, config):
  """The model, its projections reading quantized activations."""
  graph, state = nnx.split(model.decoder)
  decoder = nnx.merge(graph, state)
  for name in LINEARS:
    linear = getattr(decoder.layers, name)
    quantized = QuantizedInput(linear, level, element, config)
    setattr(decoder.layers, name, quantized)
  return dataclasses.replace(model, decoder=decoder)


def _remembering(model, level, format, activation):
  """The model, keeping keys and values as one of a format would."""
  return dataclasses.replace(
    model,
    format=format,
    levels=(level,),
    decoding=activation.decoding,
    activation=activation,
  )


def _hidden(model, tokens, level):
  forced = np.full((model.config.num_layers,), level, np.int32)
  tokens = jnp.asarray(tokens)
  return teacher_forcing.hidden_states(model, tokens, forced, "prefill")[0]


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  add = parser.add_argument
  add("--model", required=True, help="its name in the report")
  add("--work", type=Path, required=True, help="folder of checkpoints")
  add("--weights", nargs="+", required=True, help="recipes of weights")
  add("--text", type=Path, required=True)
  add("--windows", type=int, default=16, help="of 512 tokens")
  add("--skip-windows", type=int, default=0, help="leave these out")
  add("--json", type=Path, required=True)
  return parser.parse_args()


if __name__ == "__main__":
  main()
