"""The Qwen2 family: Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen."""

from typing import Any

from autoematic_jax.models import hugging_face
from autoematic_jax.models.config import ModelConfig

ARCHITECTURES = ("Qwen2ForCausalLM",)

tensor_specs = hugging_face.tensor_specs

# Where they are left out, transformers takes numbers unlike those of Llama.
_REQUIRED = ("num_key_value_heads", "max_position_embeddings")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
  """Reads a Hugging Face Qwen2 config.

  Args:
    hf: The parsed `config.json`.

  Returns:
    The equivalent ModelConfig.

  Raises:
    UnsupportedModelError: An attribute is missing, unknown or has a value
      that changes the arithmetic in a way that is not implemented.
  """
  hugging_face.no_windows(hf)
  return hugging_face.model_config(
    hf,
    family="qwen2",
    required=_REQUIRED,
    # Qwen2's code has biases of q, k and v, whatever a config says.
    fixed={
      "attention_bias": None,
      "mlp_bias": False,
      "use_sliding_window": False,
      "use_mrope": False,
    },
    ignored=hugging_face.UNUSED_WINDOW,
    qkv_bias=True,
  )
