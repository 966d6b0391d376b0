"""Times the calibration of one layer of a large model's shape.

    python tools/time_calibration.py --json calibration.json

Weights and text are random; the second layer counts, as the first compiles.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

from autoematic_jax.calibration import Calibrator
from autoematic_jax.checkpoints.options import ConvertOptions
from autoematic_jax.checkpoints.writer import ModelWeights
from autoematic_jax.evaluation import environment
from autoematic_jax.models import registry

QWEN3_8B = {
  "architectures": ["Qwen3ForCausalLM"],
  # Small, as the time of a layer does not depend on it.
  "vocab_size": 1024,
  "hidden_size": 4096,
  "intermediate_size": 12288,
  "num_hidden_layers": 36,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "max_position_embeddings": 40960,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1000000,
  "tie_word_embeddings": False,
}


def main() -> None:
  """Prints the seconds of each layer, and what all would take."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--samples", type=int, default=128)
  parser.add_argument("--tokens", type=int, default=512)
  parser.add_argument("--layers", type=int, default=2)
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  config = registry.config_from_hf(
    {**QWEN3_8B, "num_hidden_layers": args.layers}
  )
  specs = registry.tensor_specs(config)
  rng = np.random.default_rng(0)
  shape = (args.samples, args.tokens)
  tokens = rng.integers(0, config.vocab_size, shape, np.int32)
  calibrator = Calibrator(tokens)
  tensors = _tensors(specs, rng)
  weights = ModelWeights(tensors.__getitem__, specs)
  began = time.perf_counter()
  calibrator.start(config, weights, ConvertOptions(format="autofp6"))
  sensitivity = (time.perf_counter() - began) / args.layers
  print(f"sensitivity: {sensitivity:.1f} s a layer", flush=True)
  seconds = []
  for number in range(args.layers):
    began = time.perf_counter()
    jax.block_until_ready(calibrator.layer(number))
    seconds.append(time.perf_counter() - began)
    print(f"layer: {seconds[-1]:.1f} s", flush=True)
  layers = QWEN3_8B["num_hidden_layers"]
  report = {
    "model": "Qwen3-8B shapes, random weights",
    "machine": environment.machine(),
    "versions": environment.versions(),
    "tokens": [args.samples, args.tokens],
    "sensitivity_layer_s": sensitivity,
    "layer_s": seconds,
    "all_layers_s": layers * (sensitivity + seconds[-1]),
    "peak_rss_mb": environment.peak_rss_mb(),
  }
  print(json.dumps(report, indent=1))
  if args.json:
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def _tensors(specs, rng):
  """Random weights of every layer."""
  tensors = {}
  for name, spec in specs.items():
    if spec.kind == "linear":
      tensors[name] = rng.standard_normal(spec.shape, np.float32)
      tensors[name] *= spec.shape[1] ** -0.5
    elif len(spec.shape) == 1:
      tensors[name] = np.ones(spec.shape, np.float32)
    else:
      tensors[name] = rng.standard_normal(spec.shape, np.float32)
  return tensors


if __name__ == "__main__":
  main()
