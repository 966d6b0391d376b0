"""`autoematic inspect`: what a checkpoint or model file holds."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from autoematic_jax import formats
from autoematic_jax.checkpoints import Checkpoint
from autoematic_jax.checkpoints import Source
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.checkpoints import open_source
from autoematic_jax.checkpoints.convert import check_tensors
from autoematic_jax.models import registry
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import TensorSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the subcommand's arguments."""
  parser.add_argument(
    "path", help="converted checkpoint, GGUF file or Hugging Face folder"
  )


def run(args: argparse.Namespace) -> int:
  """Prints what there is to know; returns the exit code."""
  path = Path(args.path)
  if (path / layout.METADATA).exists():
    lines = _checkpoint_lines(load_checkpoint(path))
  else:
    lines = _source_lines(open_source(path))
  for name, value in lines.items():
    print(f"{name:<14} {value}")
  return 0


def _model_lines(config: ModelConfig, specs: Mapping[str, TensorSpec]):
  heads = f"{config.num_heads} / {config.num_kv_heads} of {config.head_dim}"
  lines = {
    "family": config.family,
    "parameters": f"{sum(int(np.prod(s.shape)) for s in specs.values()):,}",
    "layers": f"{config.num_layers}, width {config.hidden_size}",
    "heads": heads,
    "MLP": f"{config.intermediate_size} ({config.mlp_activation})",
    "vocabulary": f"{config.vocab_size:,}",
    "context": f"{config.max_positions:,} tokens",
  }
  if config.experts is not None:
    lines["experts"] = (
      f"{config.experts.count} a layer, {config.experts.per_token} a token"
    )
  if config.sliding_window is not None:
    whole = len(config.full_layers)
    lines["window"] = (
      f"{config.sliding_window} tokens in {config.num_layers - whole} of"
      f" {config.num_layers} layers"
    )
  return lines


def _checkpoint_lines(checkpoint: Checkpoint) -> dict[str, str]:
  specs = registry.tensor_specs(checkpoint.config)
  made = checkpoint.metadata.get("made", {})
  lines = {
    "checkpoint": str(checkpoint.path),
    **_model_lines(checkpoint.config, specs),
    "format": checkpoint.format,
    "levels": ", ".join(map(str, checkpoint.levels)) or "none",
    "stored bits": f"{checkpoint.stored_bits:.3f}",
    "source": str(made.get("source", "not said")),
    "made by": str(made.get("method", "not said")),
    "made at": str(made.get("time", "not said")),
  }
  if checkpoint.format in formats.REFINED_FORMATS:
    shares = _refined_shares(checkpoint)
    lines["refined"] = f"{_total(shares):.1%} of all subgroups of 4 weights"
    for layer, counts in sorted(shares.items()):
      lines[f"  layer {layer}"] = f"{_total({layer: counts}):.1%}"
  return lines


def _refined_shares(checkpoint) -> dict[int, tuple[int, int]]:
  """Refined subgroups of each layer and all of them, from the metadata.

  Those of matrices that share a mask count for each of their rows.
  """
  counts: dict[int, tuple[int, int]] = {}
  bytes_each = {"autofp6": 1, "autofp8": 2}[checkpoint.format]
  for name, entry in checkpoint.metadata["tensors"].items():
    if entry["kind"] != "quantized":
      continue
    rows, stored = entry["arrays"]["offsets"]["shape"]
    groups = entry["arrays"]["group_scale"]["shape"][1]
    layer = int(name.split(".")[2])
    refined, every = counts.get(layer, (0, 0))
    counts[layer] = (
      refined + rows * stored // bytes_each,
      every + rows * groups * formats.SUBGROUPS_PER_GROUP,
    )
  return counts


def _total(counts):
  refined, every = (
    sum(column) for column in zip(*counts.values(), strict=True)
  )
  return refined / every


def _source_lines(source: Source) -> dict[str, str]:
  config = registry.config_from_hf(source.config)
  specs = registry.tensor_specs(config)
  check_tensors(source, specs)
  linear = [name for name, spec in specs.items() if spec.kind == "linear"]
  packed = sum(source.packed(name) is not None for name in linear)
  rest = sorted({str(source.dtype(n)) for n in specs.keys() - set(linear)})
  lines = {
    "source": source.description,
    **_model_lines(config, specs),
    "matrices": f"{len(linear)}, of which {packed} are NVFP4",
    "other tensors": ", ".join(rest),
  }
  if packed:
    lines["conversion"] = "keeps codes and scales of the NVFP4 matrices"
  return lines
