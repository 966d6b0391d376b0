"""Tiny random models, written as the two kinds of source."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from autoematic_jax.checkpoints import convert
from autoematic_jax.models import registry

DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
}

# Neither 60 nor 464 is a multiple of 32, and 60 is none of 16.
CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 320,
  "hidden_size": 60,
  "intermediate_size": 464,
  "num_hidden_layers": 2,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "head_dim": 10,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "max_position_embeddings": 128,
  "tie_word_embeddings": True,
}


def random_weights(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  specs = registry.tensor_specs(registry.config_from_hf(dict(config)))
  return {
    name: rng.normal(size=spec.shape, scale=0.05).astype(np.float32)
    for name, spec in specs.items()
  }


def write_safetensors(
  path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32"
) -> None:
  header, data = {}, b""
  for name, values in tensors.items():
    content = np.ascontiguousarray(values).astype(DTYPES[dtype]).tobytes()
    header[name] = {
      "dtype": dtype,
      "shape": list(values.shape),
      "data_offsets": [len(data), len(data) + len(content)],
    }
    data += content
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def hf_folder(tmp_path) -> Callable[..., Path]:
  """Writes a Hugging Face folder, by default of the tiny model."""

  def write(
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    dtype: str = "F32",
    shards: int = 1,
    name: str = "tiny",
    **config: Any,
  ) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    config = {**CONFIG, **config}
    tensors = random_weights(CONFIG) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
      write_safetensors(folder / "model.safetensors", tensors, dtype)
      return folder
    places = {}
    for shard in range(shards):
      file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
      part = {n: tensors[n] for n in sorted(tensors)[shard::shards]}
      write_safetensors(folder / file, part, dtype)
      places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder

  return write


@pytest.fixture
def checkpoint_path(hf_folder, tmp_path) -> Path:
  """The tiny model as an autofp6 checkpoint."""
  convert(hf_folder(), tmp_path / "converted")
  return tmp_path / "converted"


GGUF_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  "model.layers": "blk",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
  for theirs, ours in GGUF_NAMES.items():
    name = name.replace(theirs, ours)
  return name


def permute(w: np.ndarray, heads: int) -> np.ndarray:
  """The row order of q and k in GGUF files: both halves of a head interleaved.

  Row `2 i + s` of a head is its row `i + s * head_dim / 2`.
  """
  dim = w.shape[0] // heads
  rows = [
    head * dim + half * dim // 2 + i
    for head in range(heads)
    for i in range(dim // 2)
    for half in range(2)
  ]
  return w[rows]


@pytest.fixture
def gguf_file(tmp_path, trained_bpe) -> Callable[..., Path]:
  """Writes a GGUF file of the tiny model, with its tokenizer."""

  def write(
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    name: str = "tiny.gguf",
  ) -> Path:
    writer = gguf.GGUFWriter(tmp_path / name, architecture)
    fields = gguf_metadata(trained_bpe) | dict(metadata or {})
    for key, value in fields.items():
      _add_field(writer, key, value)
    tensors = random_weights(CONFIG) if tensors is None else tensors
    for key, values in tensors.items():
      if "q_proj" in key:
        values = permute(values, CONFIG["num_attention_heads"])
      if "k_proj" in key:
        values = permute(values, CONFIG["num_key_value_heads"])
      kind = (types or {}).get(key, gguf.GGMLQuantizationType.F32)
      data = gguf.quants.quantize(values, kind)
      writer.add_tensor(gguf_name(key), data, raw_dtype=kind)
    for key, values in (extra or {}).items():
      writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / name

  return write


def gguf_metadata(bpe: tokenizers.Tokenizer) -> dict[str, Any]:
  model = json.loads(bpe.to_str())["model"]
  vocab = sorted(model["vocab"], key=model["vocab"].get)
  return {
    "llama.block_count": CONFIG["num_hidden_layers"],
    "llama.context_length": CONFIG["max_position_embeddings"],
    "llama.embedding_length": CONFIG["hidden_size"],
    "llama.feed_forward_length": CONFIG["intermediate_size"],
    "llama.attention.head_count": CONFIG["num_attention_heads"],
    "llama.attention.head_count_kv": CONFIG["num_key_value_heads"],
    "llama.attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
    "llama.rope.freq_base": CONFIG["rope_theta"],
    "llama.rope.dimension_count": CONFIG["head_dim"],
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": vocab,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(vocab) - 3),
    "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0].content }}",
  }


def _add_field(writer, key, value):
  if isinstance(value, bool):
    writer.add_bool(key, value)
  elif isinstance(value, int):
    writer.add_uint32(key, value)
  elif isinstance(value, float):
    writer.add_float32(key, value)
  elif isinstance(value, str):
    writer.add_string(key, value)
  elif value is not None:
    writer.add_array(key, value)
