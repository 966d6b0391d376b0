"""The dense models of the Qwen3 family."""

from typing import Any

from autoematic_jax.models import hugging_face
from autoematic_jax.models.config import ModelConfig

ARCHITECTURES = ("Qwen3ForCausalLM",)

tensor_specs = hugging_face.tensor_specs

# Where they are left out, transformers takes numbers unlike those of Llama.
_REQUIRED = ("num_key_value_heads", "head_dim", "max_position_embeddings")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
  """Reads a Hugging Face Qwen3 config.

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
    family="qwen3",
    required=_REQUIRED,
    fixed={"mlp_bias": False, "use_sliding_window": False},
    ignored=hugging_face.UNUSED_WINDOW,
    qk_norm=True,
  )
