"""The text models of Gemma 2 and Gemma 3."""

from typing import Any

from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import hugging_face
from autoematic_jax.models.config import ModelConfig

ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")

tensor_specs = hugging_face.tensor_specs

_REQUIRED = (
  "num_key_value_heads",
  "head_dim",
  "max_position_embeddings",
  "query_pre_attn_scalar",
  "sliding_window",
)
_SOFTCAPS = {
  "attn_logit_softcapping": "attention_softcap",
  "final_logit_softcapping": "logit_softcap",
}
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
  """Reads a Hugging Face config of Gemma 2 or Gemma 3.

  Args:
    hf: The parsed `config.json`.

  Returns:
    The equivalent ModelConfig.

  Raises:
    UnsupportedModelError: An attribute is missing, unknown or has a value
      that changes the arithmetic in a way that is not implemented.
  """
  third = "Gemma3ForCausalLM" in hf["architectures"]
  hugging_face.require(hf, _REQUIRED)
  missing = [name for name in _SOFTCAPS if not third and name not in hf]
  if missing:
    raise UnsupportedModelError(f"config.json lacks {missing[0]!r}")
  settings = {ours: hf.get(theirs) for theirs, ours in _SOFTCAPS.items()}
  if third:
    hf, settings["local_rope_theta"] = _split_rope(hf)
  activation = "gelu_pytorch_tanh"
  return hugging_face.model_config(
    {"tie_word_embeddings": True, **hf},
    family="gemma",
    required=_REQUIRED,
    fixed={
      "hidden_act": activation,
      "hidden_activation": activation,
      "mlp_bias": False,
      "use_bidirectional_attention": False,
    },
    ignored=(
      *_PATTERNS,
      *_SOFTCAPS,
      "cache_implementation",
      "layer_types",
      "query_pre_attn_scalar",
      "sliding_window",
    ),
    qk_norm=third,
    sliding_window=hf["sliding_window"],
    full_layers=_full_layers(hf, 6 if third else 2),
    query_scale=hf["query_pre_attn_scalar"] ** -0.5,
    embedding_scale=hf["hidden_size"] ** 0.5,
    mlp_activation="gelu_tanh",
    post_norms=True,
    norms_less_one=True,
    **settings,
  )


def _full_layers(hf, default) -> tuple[int, ...]:
  """Layers without the window: listed, or the last of each few."""
  kinds = hf.get("layer_types")
  if kinds is None:
    pattern = next((hf[p] for p in _PATTERNS if hf.get(p)), default)
    return tuple(range(pattern - 1, hf["num_hidden_layers"], pattern))
  unknown = set(kinds) - {"full_attention", "sliding_attention"}
  if unknown or len(kinds) != hf["num_hidden_layers"]:
    raise UnsupportedModelError(
      f"config.json lists {len(kinds)} layer_types of kinds"
      f" {sorted(set(kinds))} for {hf['num_hidden_layers']} layers; handled:"
      " 'full_attention' and 'sliding_attention', one for each"
    )
  return tuple(n for n, kind in enumerate(kinds) if kind == "full_attention")


def _split_rope(hf) -> tuple[dict[str, Any], float]:
  """A config with the rope of the full layers only, and the other base.

  transformers 5 keeps the rope of each kind of layer in `rope_parameters`,
  older versions the base of the windowed layers in `rope_local_base_freq`.
  """
  parameters = hf.get("rope_parameters")
  if parameters is None:
    hugging_face.require(hf, ("rope_theta", "rope_local_base_freq"))
    flat = {k: v for k, v in hf.items() if k != "rope_local_base_freq"}
    return flat, float(hf["rope_local_base_freq"])
  try:
    full, local = parameters["full_attention"], parameters["sliding_attention"]
    theta = float(local["rope_theta"])
  except (KeyError, TypeError):
    raise UnsupportedModelError(
      f"config.json has rope_parameters={parameters!r}; Gemma 3 needs"
      " 'full_attention' and 'sliding_attention' in it, each with a rope_theta"
    ) from None
  if local.get("rope_type", "default") != "default":
    raise UnsupportedModelError(
      f"rope type {local['rope_type']!r} of 'sliding_attention' is not handled;"
      " handled: default"
    )
  return {**hf, "rope_parameters": full}, theta
