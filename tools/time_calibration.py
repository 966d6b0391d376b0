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
from autoematic_jax.evaluation import environment
from autoematic_jax.models import registry

QWEN3_8B = {
  "architectures": ["Qwen3ForCausalLM"],
  # Only the embedding depends on it, which calibration merely looks up.
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
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--samples", type=int, default=128)
  parser.add_argument("--tokens", type=int, default=512)
  parser.add_argument("--layers", type=int, default=2)
  parser.add_argument("--json", type=Path)
  args = parser.parse_args()
  config = registry.config_from_hf(QWEN3_8B)
  specs = registry.tensor_specs(config)
  rng = np.random.default_rng(0)
  vocab, width = specs["model.embed_tokens.weight"].shape
  tokens = rng.integers(0, vocab, (args.samples, args.tokens), np.int32)
  calibrator = Calibrator(tokens)
  embedding = rng.standard_normal((vocab, width), np.float32)
  calibrator.start(config, embedding, ConvertOptions(format="autofp6"))
  weights, groups = _layer(specs, rng)
  seconds = []
  for _ in range(args.layers):
    began = time.perf_counter()
    jax.block_until_ready(calibrator.layer(weights, groups))
    seconds.append(time.perf_counter() - began)
    print(f"layer: {seconds[-1]:.1f} s", flush=True)
  report = {
    "model": "Qwen3-8B shapes, random weights",
    "machine": environment.machine(),
    "versions": environment.versions(),
    "tokens": [args.samples, args.tokens],
    "layer_s": seconds,
    "all_layers_s": seconds[-1] * config.num_layers,
    "peak_rss_mb": environment.peak_rss_mb(),
  }
  print(json.dumps(report, indent=1))
  if args.json:
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def _layer(specs, rng):
  """Random weights of a layer, and the matrices that read each input."""
  prefix = "model.layers.0."
  weights, groups = {}, {}
  for name, spec in specs.items():
    if not name.startswith(prefix):
      continue
    relative = name.removeprefix(prefix)
    if spec.kind == "linear":
      weights[relative] = rng.standard_normal(spec.shape, np.float32)
      weights[relative] *= spec.shape[1] ** -0.5
      reader = spec.input_group.removeprefix(prefix)
      groups.setdefault(reader, []).append(relative)
    else:
      weights[relative] = np.ones(spec.shape, np.float32)
  return weights, groups


if __name__ == "__main__":
  main()
