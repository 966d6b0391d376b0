"""Measures what weights, activations and KV cache each cost by themselves.

    python tools/measure_parts.py --model reference --work build/accuracy \
      --text sample.txt --weights nvfp4 fp6g best --json benchmarks/parts.json

One part is quantized and the others stay in full precision: weights as they are
in a checkpoint that `tools/measure_accuracy.py` made, activations and KV cache
by each format.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import autoematic_jax
from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax import policy as policy_lib
from autoematic_jax.evaluation import environment
from autoematic_jax.evaluation import quality
from autoematic_jax.evaluation import text_scores
from autoematic_jax.pallas_kernels.activation_quantization import PAPER
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows

LINEARS = ("qkv", "output", "gate_up", "down")
FULL = "full"

# Activations: level, element and how they are refined.
ACTIVATIONS = {
  "nvfp4": (4, "e2m1", ActivationConfig()),
  "fp6g": (6, "e2m3", ActivationConfig()),
  "autofp6, paper": (6, "e2m1", dataclasses.replace(PAPER, decoding="fixed")),
  "autofp6, exponent step": (6, "e2m1", PAPER),
  "autofp6, any base": (
    6,
    "e2m1",
    dataclasses.replace(PAPER, nearest_base=False),
  ),
  "autofp6, threshold 0.0005": (6, "e2m1", ActivationConfig()),
}

# KV cache: level and codec.
CACHES = {
  "nvfp4": (4, kv_codecs.AutoFPCodec("exponent")),
  "fp6g": (6, kv_codecs.FP6gCodec()),
  "autofp6, paper": (6, kv_codecs.AutoFPCodec("fixed", nearest_base=True)),
  "autofp6, exponent step": (6, kv_codecs.AutoFPCodec(nearest_base=True)),
  "autofp6, any base": (6, kv_codecs.AutoFPCodec("exponent")),
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
  reference = [_hidden(exact.decoder, tokens, None) for tokens in windows]
  cases = [
    ("weights", name, _load(args, f"{args.model}-{name}").decoder, None)
    for name in args.weights
  ]
  cases += [
    ("activations", name, _reading(exact.decoder, *how), None)
    for name, how in ACTIVATIONS.items()
  ]
  cases += [("kv", name, exact.decoder, how) for name, how in CACHES.items()]
  rows = []
  for part, name, decoder, cache in tqdm(cases, unit="case"):
    kl = [
      text_scores.score(
        decoder, _hidden(decoder, tokens, cache), exact.decoder, known, tokens
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
  _report(args, rows)


def _load(args, name):
  return autoematic_jax.load(
    args.work / name, compute_dtype="float32", dense=True
  )


def _reading(decoder, level, element, config):
  """The decoder, its projections reading quantized activations."""
  graph, state = nnx.split(decoder)
  copy = nnx.merge(graph, state)
  for name in LINEARS:
    linear = getattr(copy.layers, name)
    setattr(copy.layers, name, QuantizedInput(linear, level, element, config))
  return copy


def _hidden(decoder, tokens, cache):
  level, codec = cache or (0, kv_codecs.DenseCodec())
  return _run(decoder, jnp.asarray(tokens), level=level, codec=codec)


@partial(jax.jit, static_argnames=("level", "codec"))
def _run(decoder, tokens, *, level, codec):
  """Hidden states of a text before the final norm."""
  config, policy = decoder.config, policy_lib.PolicyConfig()
  empty = kv_cache.init_cache(
    num_layers=config.num_layers,
    batch=1,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    capacity=tokens.shape[0],
    codec=codec,
  )
  hidden, *_ = decoder.run_layers(
    tokens[None],
    start=jnp.zeros((1,), jnp.int32),
    lengths=jnp.full((1,), tokens.shape[0], jnp.int32),
    cache=empty,
    policy=policy_lib.start_prefill(policy, 1),
    forced=jnp.full((config.num_layers,), level, jnp.int32),
    policy_config=policy,
    phase="prefill",
  )
  return hidden[0]


def _report(args, rows):
  report: dict[str, Any] = {"rows": []}
  if args.json.exists():
    report = json.loads(args.json.read_text())
  others = [row for row in report["rows"] if row["model"] != args.model]
  report["rows"] = others + rows
  report["machine"] = environment.machine()
  report["versions"] = environment.versions()
  command = shlex.join(["python", *sys.argv])
  report.setdefault("command", {})[args.model] = command
  args.json.write_text(json.dumps(report, indent=1) + "\n")
  for row in rows:
    print(f"{row['part']:<12} {row['format']:<26} {row['kl_mean']:.4f}")


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
