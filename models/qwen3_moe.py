"""Qwen3 models with experts."""

from typing import Any

from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import hugging_face
from autoematic_jax.models.config import ExpertsConfig
from autoematic_jax.models.config import ModelConfig

ARCHITECTURES = ("Qwen3MoeForCausalLM",)

tensor_specs = hugging_face.tensor_specs

_REQUIRED = (
  "num_key_value_heads",
  "head_dim",
  "max_position_embeddings",
  "moe_intermediate_size",
  "num_experts_per_tok",
  "norm_topk_prob",
)

# transformers 5 writes the second name.
_COUNT = ("num_experts", "num_local_experts")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
  """Reads a Hugging Face Qwen3-MoE config.

  Args:
    hf: The parsed `config.json`.

  Returns:
    The equivalent ModelConfig.

  Raises:
    UnsupportedModelError: An attribute is missing, unknown or has a value
      that changes the arithmetic in a way that is not implemented.
  """
  hugging_face.no_windows(hf)
  counts = {hf[name] for name in _COUNT if hf.get(name) is not None}
  if len(counts) != 1:
    raise UnsupportedModelError(
      f"config.json must say one number of experts in {' or '.join(_COUNT)};"
      f" it says {sorted(counts)}"
    )
  hugging_face.require(hf, _REQUIRED)
  return hugging_face.model_config(
    hf,
    family="qwen3_moe",
    required=_REQUIRED,
    fixed={
      "decoder_sparse_step": 1,
      "mlp_bias": False,
      "mlp_only_layers": [],
      "use_sliding_window": False,
    },
    ignored=(
      *_COUNT,
      *_REQUIRED,
      *hugging_face.UNUSED_WINDOW,
      "output_router_logits",
      "router_aux_loss_coef",
    ),
    qk_norm=True,
    intermediate_size=hf["moe_intermediate_size"],
    experts=ExpertsConfig(
      count=counts.pop(),
      per_token=hf["num_experts_per_tok"],
      renormalize=hf["norm_topk_prob"],
    ),
  )
