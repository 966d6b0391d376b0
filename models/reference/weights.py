"""The network in Hugging Face's Qwen3 layout, and back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from autoematic_jax.models.reference.network import NetworkConfig
from autoematic_jax.models.reference.network import Params

_NORMS = {
  "input_norm": "input_layernorm",
  "q_norm": "self_attn.q_norm",
  "k_norm": "self_attn.k_norm",
  "mlp_norm": "post_attention_layernorm",
}

# Matrices that are one here and several there, `[in, out]` here.
_MATRICES = {
  "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
  "output": ("self_attn.o_proj",),
  "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
  "down": ("mlp.down_proj",),
}

# Of the same name, and of another.
_SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "hidden_size",
  "intermediate_size": "intermediate_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "rms_norm_eps": "rms_norm_eps",
  "rope_theta": "rope_theta",
  "max_positions": "max_position_embeddings",
}


def hf_config(
  config: NetworkConfig, *, eos_id: int, pad_id: int
) -> dict[str, Any]:
  """The `config.json` that transformers builds the same network from."""
  sizes = dataclasses.asdict(config)
  return {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": eos_id,
    "pad_token_id": pad_id,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    **{theirs: sizes[ours] for ours, theirs in _SIZES.items()},
  }


def to_hf(params: Params, config: NetworkConfig) -> dict[str, np.ndarray]:
  """Weights by their Hugging Face names, rounded to bfloat16."""
  tensors = {
    "model.embed_tokens.weight": params["embedding"],
    "model.norm.weight": params["norm"],
  }
  for layer in range(config.num_layers):
    prefix = f"model.layers.{layer}"
    weights = {k: np.asarray(v)[layer] for k, v in params["layers"].items()}
    for ours, theirs in _NORMS.items():
      tensors[f"{prefix}.{theirs}.weight"] = weights[ours]
    for ours, names in _MATRICES.items():
      parts = np.split(weights[ours].T, _ends(ours, config))
      for name, part in zip(names, parts, strict=True):
        tensors[f"{prefix}.{name}.weight"] = part
  # The file takes an array's memory as it lies.
  return {
    name: np.ascontiguousarray(np.asarray(x).astype(ml_dtypes.bfloat16))
    for name, x in tensors.items()
  }


def from_hf(tensors: dict[str, np.ndarray], config: NetworkConfig) -> Params:
  """Float32 weights as the network takes them."""

  def get(name: str) -> np.ndarray:
    return tensors[f"model.{name}.weight"].astype(np.float32)

  count = range(config.num_layers)
  layers = {
    ours: np.stack([get(f"layers.{i}.{theirs}") for i in count])
    for ours, theirs in _NORMS.items()
  }
  for ours, names in _MATRICES.items():
    layers[ours] = np.stack(
      [np.concatenate([get(f"layers.{i}.{n}") for n in names]).T for i in count]
    )
  return {
    "embedding": get("embed_tokens"),
    "layers": layers,
    "norm": get("norm"),
  }


def save(
  folder: Path,
  params: Params,
  config: NetworkConfig,
  *,
  eos_id: int,
  pad_id: int,
) -> None:
  """Writes `model.safetensors`, `config.json` and `generation_config.json`."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "model.safetensors"
  save_file(to_hf(params, config), path, metadata={"format": "pt"})
  # It is made readable by its owner only.
  path.chmod(0o644)
  described = hf_config(config, eos_id=eos_id, pad_id=pad_id)
  _write_json(folder / "config.json", described)
  ends = {"eos_token_id": [eos_id, pad_id], "pad_token_id": pad_id}
  _write_json(folder / "generation_config.json", ends)


def load(folder: Path) -> tuple[Params, NetworkConfig]:
  """Reads what `save` wrote."""
  described = json.loads((folder / "config.json").read_text())
  config = NetworkConfig(
    **{ours: described[theirs] for ours, theirs in _SIZES.items()}
  )
  return from_hf(load_file(folder / "model.safetensors"), config), config


def _ends(name: str, config: NetworkConfig) -> list[int]:
  """Rows at which a joined matrix is split."""
  if name == "qkv":
    heads = config.num_heads * config.head_dim
    return [heads, heads + config.num_kv_heads * config.head_dim]
  return [config.intermediate_size] if name == "gate_up" else []


def _write_json(path: Path, data: dict[str, Any]) -> None:
  path.write_text(json.dumps(data, indent=2) + "\n")
