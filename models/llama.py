"""The Llama family: SmolLM2, Llama 3.x, DeepSeek-R1-Distill-Llama."""

from typing import Any

from autoematic_jax.models import hugging_face
from autoematic_jax.models.config import ModelConfig

ARCHITECTURES = ("LlamaForCausalLM",)

tensor_specs = hugging_face.tensor_specs


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
  """Reads a Hugging Face Llama config.

  Args:
    hf: The parsed `config.json`.

  Returns:
    The equivalent ModelConfig.

  Raises:
    UnsupportedModelError: An attribute is missing, unknown or has a value
      that changes the arithmetic in a way that is not implemented.
  """
  return hugging_face.model_config(
    hf,
    family="llama",
    fixed={"pretraining_tp": 1, "rope_interleaved": False},
    ignored=("is_llama_config",),
  )
