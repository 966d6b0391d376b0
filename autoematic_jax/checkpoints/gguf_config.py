"""The metadata of a GGUF file as a Hugging Face config."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import UnsupportedModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Hugging Face's name of each GGUF architecture that is handled."""

_KNOWN = frozenset(
  {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
  }
)

# Llama 3.1 to 3.3 differ in the factor only.
_LOW_FREQ_FACTOR = 1.0
_HIGH_FREQ_FACTOR = 4.0
_ORIGINAL_POSITIONS = 8192


def hf_config(
  metadata: Mapping[str, Any],
  shapes: Mapping[str, tuple[int, ...]],
  rope_divisors: Float[np.ndarray, "F"] | None,
  source: str,
) -> dict[str, Any]:
  """A Hugging Face config of a GGUF file.

  Args:
    metadata: Every key and value of the file, whose architecture is handled.
    shapes: Shape of each tensor by Hugging Face name.
    rope_divisors: The tensor `rope_freqs.weight`, where there is one.
    source: Name of the file, for messages.

  Returns:
    What `config.json` of the same model would say.

  Raises:
    CheckpointError: A needed key or tensor is missing.
    UnsupportedModelError: Names the key that is not handled.
  """
  fields = _Fields(metadata, source)
  fields.refuse_unknown()
  if "model.embed_tokens.weight" not in shapes:
    raise CheckpointError(f"{source} lacks the tensor token_embd.weight")
  heads = fields.integer("attention.head_count")
  width = fields.integer("embedding_length")
  head_dim = fields.integer("attention.key_length", width // max(heads, 1))
  for key in ("attention.value_length", "rope.dimension_count"):
    fields.must_be(key, head_dim)
  theta = float(fields.get("rope.freq_base", 10000.0))
  return {
    "architectures": [ARCHITECTURES[fields.architecture]],
    "vocab_size": shapes["model.embed_tokens.weight"][0],
    "hidden_size": width,
    "intermediate_size": fields.integer("feed_forward_length"),
    "num_hidden_layers": fields.integer("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "rms_norm_eps": float(fields.get("attention.layer_norm_rms_epsilon")),
    "rope_theta": theta,
    "rope_scaling": _rope_scaling(fields, rope_divisors, theta, head_dim),
    "max_position_embeddings": fields.integer("context_length"),
    "tie_word_embeddings": "lm_head.weight" not in shapes,
    "attention_bias": _any_bias(shapes, ".self_attn."),
    "mlp_bias": _any_bias(shapes, ".mlp."),
  }


_REQUIRED = object()


class _Fields:
  """Metadata keys of the architecture, each error naming its key."""

  def __init__(self, metadata, source):
    self._metadata = metadata
    self.source = source
    self.architecture = metadata["general.architecture"]
    self.prefix = f"{self.architecture}."

  def refuse_unknown(self):
    for key, value in self._metadata.items():
      name = key.removeprefix(self.prefix)
      if key.startswith(self.prefix) and name not in _KNOWN:
        raise UnsupportedModelError(
          f"{self.source}: metadata {key}={value!r} is not handled"
        )
    self.must_be("expert_count", 0)

  def get(self, key, default=_REQUIRED):
    value = self._metadata.get(self.prefix + key, default)
    if value is _REQUIRED:
      raise CheckpointError(
        f"{self.source} lacks the metadata {self.prefix}{key}"
      )
    return value

  def integer(self, key, default=_REQUIRED) -> int:
    value = self.get(key, default)
    if not isinstance(value, int):
      raise UnsupportedModelError(
        f"{self.source}: metadata {self.prefix}{key}={value!r} is not one"
        " integer"
      )
    return value

  def must_be(self, key, wanted):
    value = self.get(key, wanted)
    if value != wanted:
      raise UnsupportedModelError(
        f"{self.source}: metadata {self.prefix}{key}={value!r} is not handled;"
        f" handled: {wanted}"
      )


def _any_bias(shapes, part):
  return any(part in name and name.endswith(".bias") for name in shapes)


def _rope_scaling(fields, divisors, theta, head_dim):
  kind = fields.get("rope.scaling.type", "none")
  if kind not in ("none", "linear"):
    raise UnsupportedModelError(
      f"{fields.source}: metadata {fields.prefix}rope.scaling.type={kind!r} is"
      " not handled; handled: none, linear, and Llama 3's rope_freqs.weight"
    )
  if kind == "linear":
    if divisors is not None:
      raise UnsupportedModelError(
        f"{fields.source} has both linear rope scaling and rope_freqs.weight"
      )
    factor = float(fields.get("rope.scaling.factor"))
    return {"rope_type": "linear", "factor": factor}
  if divisors is None:
    return None
  return _llama3_scaling(divisors, theta, head_dim, fields.source)


def _llama3_scaling(divisors, theta, head_dim, source):
  """The config whose frequency divisors a file stores as a tensor."""
  factor = float(divisors.max())
  wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
  blend = (_ORIGINAL_POSITIONS / wavelength - _LOW_FREQ_FACTOR) / (
    _HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR
  )
  blend = np.clip(blend, 0.0, 1.0)
  expected = 1 / ((1 - blend) / factor + blend)
  if divisors.shape != expected.shape or not np.allclose(
    divisors, expected, rtol=1e-4
  ):
    raise UnsupportedModelError(
      f"{source}: the frequencies of rope_freqs.weight are not those of Llama"
      " 3's rope scaling; nothing else is handled"
    )
  return {
    "rope_type": "llama3",
    "factor": factor,
    "low_freq_factor": _LOW_FREQ_FACTOR,
    "high_freq_factor": _HIGH_FREQ_FACTOR,
    "original_max_position_embeddings": _ORIGINAL_POSITIONS,
  }
