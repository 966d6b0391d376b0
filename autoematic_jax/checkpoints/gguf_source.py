"""GGUF files of the llama architecture, as Hugging Face tensors and config."""

import re
from pathlib import Path

import numpy as np

from autoematic_jax.checkpoints import gguf_tokenizer
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import UnsupportedModelError

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource(Source):
  """A GGUF file; quantized tensors are dequantized by the gguf package.

  Raises:
    CheckpointError: The file is truncated or lacks something.
    UnsupportedModelError: Another architecture than llama.
  """

  def __init__(self, path: Path):
    gguf = _import_gguf()
    self.path = path
    self.description = f"GGUF file {path.name}"
    try:
      self._reader = gguf.GGUFReader(path)
      self._check_length()
    except CheckpointError:
      raise
    except Exception as error:  # The package raises whatever it stumbles on.
      raise CheckpointError(
          f"{path} is truncated or damaged: {type(error).__name__}: {error}"
      ) from error
    self._dequantize = gguf.quants.dequantize
    architecture = self.field("general.architecture")
    if architecture != "llama":
      raise UnsupportedModelError(
          f"{path.name}: GGUF architecture {architecture!r} is not handled;"
          " handled: llama"
      )
    self._tensors = {
        self._hf_name(tensor.name): tensor for tensor in self._reader.tensors
    }
    self.config = self._config()

  def _check_length(self):
    size = self.path.stat().st_size
    for tensor in self._reader.tensors:
      end = int(tensor.data_offset) + int(tensor.n_bytes)
      if end > size:
        raise CheckpointError(
            f"{self.path} is truncated: {tensor.name} ends at byte {end} of"
            f" {size}"
        )

  def field(self, key: str, default=None):
    """A metadata value, or the default."""
    field = self._reader.get_field(key)
    return default if field is None else field.contents()

  def _need(self, key):
    value = self.field(key)
    if value is None:
      raise CheckpointError(f"{self.path.name} lacks the metadata {key}")
    return value

  def _hf_name(self, name):
    if name in _GLOBAL:
      return _GLOBAL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
      return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    if name == "rope_freqs.weight":
      raise UnsupportedModelError(
          f"{self.path.name}: rope frequencies stored as a tensor"
          " (rope_freqs.weight) are not handled; convert the safetensors folder"
      )
    raise UnsupportedModelError(
        f"{self.path.name}: tensor {name} is not handled for llama"
    )

  def _config(self):
    heads = int(self._need("llama.attention.head_count"))
    width = int(self._need("llama.embedding_length"))
    vocab = self._tensors["model.embed_tokens.weight"].shape[1]
    scaling = self.field("llama.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
      raise UnsupportedModelError(
          f"{self.path.name}: rope scaling {scaling!r} is not handled in GGUF"
      )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": int(vocab),
        "hidden_size": width,
        "intermediate_size": int(self._need("llama.feed_forward_length")),
        "num_hidden_layers": int(self._need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(
            self.field("llama.attention.head_count_kv", heads)
        ),
        "head_dim": int(
            self.field("llama.attention.key_length", width // heads)
        ),
        "rms_norm_eps": float(
            self._need("llama.attention.layer_norm_rms_epsilon")
        ),
        "rope_theta": float(self.field("llama.rope.freq_base", 10000.0)),
        "max_position_embeddings": int(self._need("llama.context_length")),
        "tie_word_embeddings": "lm_head.weight" not in self._tensors,
    }
    if scaling == "linear":
      factor = float(self._need("llama.rope.scaling.factor"))
      config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config

  @property
  def names(self) -> set[str]:
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def read(self, name: str) -> np.ndarray:
    tensor = self._tensors[name]
    try:
      values = self._dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError, KeyError) as error:
      raise CheckpointError(
          f"{name} has GGUF type {tensor.tensor_type.name}, which cannot be"
          f" dequantized: {error}"
      ) from error
    values = np.asarray(values, np.float32).reshape(self.shape(name))
    if ".self_attn.q_proj." in name:
      return _unpermute(values, self.config["num_attention_heads"])
    if ".self_attn.k_proj." in name:
      return _unpermute(values, self.config["num_key_value_heads"])
    return values

  def tokenizer_files(self) -> dict[str, bytes]:
    return gguf_tokenizer.tokenizer_files(self.field, self.path.name)


def _unpermute(w, heads):
  """Undoes the row order that GGUF uses for interleaved rope."""
  half = w.shape[0] // heads // 2
  split = w.reshape(heads, half, 2, *w.shape[1:])
  return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(w.shape)


def _import_gguf():
  try:
    import gguf
    import gguf.quants
  except ImportError:
    raise CheckpointError(
        "reading GGUF needs the gguf package: pip install"
        " 'autoematic_jax[gguf]'"
    ) from None
  return gguf
