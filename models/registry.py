"""Finds the family file of a Hugging Face config."""

from typing import Any

from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import gemma
from autoematic_jax.models import llama
from autoematic_jax.models import mistral
from autoematic_jax.models import qwen2
from autoematic_jax.models import qwen3
from autoematic_jax.models import qwen3_moe
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import TensorSpec

_FAMILIES = {
  "gemma": gemma,
  "llama": llama,
  "mistral": mistral,
  "qwen2": qwen2,
  "qwen3": qwen3,
  "qwen3_moe": qwen3_moe,
}


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
  """Reads a Hugging Face `config.json` of any handled architecture.

  Raises:
    UnsupportedModelError: Names the architecture or the attribute.
  """
  architectures = hf.get("architectures") or []
  for family in _FAMILIES.values():
    if any(name in family.ARCHITECTURES for name in architectures):
      return family.config_from_hf(hf)
  handled = sorted(
    name for family in _FAMILIES.values() for name in family.ARCHITECTURES
  )
  raise UnsupportedModelError(
    f"architecture {architectures or hf.get('model_type')!r} is not handled;"
    f" handled: {', '.join(handled)}"
  )


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
  """Every tensor of a model, keyed by Hugging Face name.

  Raises:
    UnsupportedModelError: The family is unknown.
  """
  if config.family not in _FAMILIES:
    raise UnsupportedModelError(
      f"model family {config.family!r} is not handled; handled:"
      f" {', '.join(sorted(_FAMILIES))}"
    )
  return _FAMILIES[config.family].tensor_specs(config)
