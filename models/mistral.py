"""The Mistral family: Mistral 7B, Mistral Nemo, Mistral Small (text only)."""

from typing import Any

from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import hugging_face
from autoematic_jax.models.config import ModelConfig

ARCHITECTURES = ("MistralForCausalLM",)

tensor_specs = hugging_face.tensor_specs

# Where they are left out, transformers takes numbers unlike those of Llama.
_REQUIRED = ("num_key_value_heads", "max_position_embeddings")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
  """Reads a Hugging Face Mistral config.

  Args:
    hf: The parsed `config.json`.

  Returns:
    The equivalent ModelConfig.

  Raises:
    UnsupportedModelError: An attribute is missing, unknown or has a value
      that changes the arithmetic in a way that is not implemented.
  """
  if "sliding_window" not in hf:
    raise UnsupportedModelError(
      "config.json lacks 'sliding_window'; null says that there is none"
    )
  return hugging_face.model_config(
    hf,
    family="mistral",
    required=_REQUIRED,
    fixed={"attention_bias": False, "mlp_bias": False},
    ignored=("sliding_window",),
    sliding_window=hf["sliding_window"],
  )
