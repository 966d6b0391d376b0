"""Hugging Face configs and tensor names, as far as families share them."""

from collections.abc import Collection, Mapping
from typing import Any

from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import RopeScaling
from autoematic_jax.models.config import TensorSpec

# Present in published configs, without effect on inference.
_IGNORED = frozenset(
  {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
  }
)

# Accepted with this value only.
_FIXED = {"hidden_act": "silu", "is_encoder_decoder": False}

_FIELDS = {
  "vocab_size": "vocab_size",
  "hidden_size": "hidden_size",
  "intermediate_size": "intermediate_size",
  "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "rms_norm_eps": "rms_norm_eps",
  "max_position_embeddings": "max_positions",
  "tie_word_embeddings": "tie_word_embeddings",
  "attention_bias": "attention_bias",
  "mlp_bias": "mlp_bias",
}

_REQUIRED = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
)

UNUSED_WINDOW = ("layer_types", "max_window_layers", "sliding_window")
"""What means nothing where no layer has a window (`no_windows`)."""

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def model_config(
  hf: Mapping[str, Any],
  *,
  family: str,
  required: Collection[str] = (),
  fixed: Mapping[str, Any],
  ignored: Collection[str],
  **settings: Any,
) -> ModelConfig:
  """Reads a config, refusing every attribute that is not handled.

  Args:
    hf: The parsed `config.json`.
    family: Name of the family file.
    required: Attributes that must be given, besides those of every family.
    fixed: Attributes that are accepted with one value only.
    ignored: Attributes without effect on inference.
    **settings: Fields of `ModelConfig` that the family decides.

  Returns:
    The equivalent ModelConfig.

  Raises:
    UnsupportedModelError: An attribute is missing, unknown or has a value
      that changes the arithmetic in a way that is not implemented.
  """
  require(hf, (*_REQUIRED, *required))
  fixed = {**_FIXED, **fixed}
  known = {*_FIELDS, *fixed, *_IGNORED, *ignored, *_ROPE_KEYS}
  for name, value in hf.items():
    if name in fixed and value != fixed[name] and value is not None:
      raise UnsupportedModelError(
        f"config.json has {name}={value!r}; only {fixed[name]!r} is handled"
      )
    if name not in known:
      raise UnsupportedModelError(
        f"config.json attribute {name}={value!r} is not handled for {family}"
      )
  fields = {
    ours: hf[theirs]
    for theirs, ours in _FIELDS.items()
    if hf.get(theirs) is not None
  }
  fields.setdefault("num_kv_heads", fields["num_heads"])
  if "head_dim" not in fields:
    if fields["hidden_size"] % fields["num_heads"]:
      raise UnsupportedModelError(
        f"hidden_size={fields['hidden_size']} is not divisible by"
        f" num_attention_heads={fields['num_heads']} and no head_dim is given"
      )
    fields["head_dim"] = fields["hidden_size"] // fields["num_heads"]
  fields["rms_norm_eps"] = float(fields.get("rms_norm_eps", 1e-6))
  return ModelConfig(family=family, **{**fields, **_rope(hf), **settings})


def require(hf: Mapping[str, Any], names: Collection[str]) -> None:
  """Refuses a config without one of these attributes.

  Raises:
    UnsupportedModelError: Names the first that is missing or null.
  """
  for name in names:
    if hf.get(name) is None:
      raise UnsupportedModelError(f"config.json lacks {name!r}")


def no_windows(hf: Mapping[str, Any]) -> None:
  """Refuses layers that do not see every key.

  Raises:
    UnsupportedModelError: Names the kind of layer.
  """
  for kind in hf.get("layer_types") or ():
    if kind != "full_attention":
      raise UnsupportedModelError(
        f"config.json has {kind!r} in layer_types; only 'full_attention' is"
        " handled"
      )


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Rope fields from `rope_theta` + `rope_scaling` or `rope_parameters`."""
  parameters = dict(hf.get("rope_parameters") or {})
  scaling = dict(hf.get("rope_scaling") or {})
  if parameters and scaling and parameters != scaling:
    raise UnsupportedModelError(
      "config.json has both rope_scaling and rope_parameters and they differ"
    )
  merged = parameters or scaling
  theta = merged.pop("rope_theta", hf.get("rope_theta", 10000.0))
  kind = merged.pop("rope_type", merged.pop("type", "default"))
  merged.pop("type", None)
  if kind == "default":
    allowed = {}
  elif kind == "linear":
    allowed = {"factor": "factor"}
  elif kind == "llama3":
    allowed = {
      "factor": "factor",
      "low_freq_factor": "low_freq_factor",
      "high_freq_factor": "high_freq_factor",
      "original_max_position_embeddings": "original_max_positions",
    }
  else:
    raise UnsupportedModelError(
      f"rope type {kind!r} is not handled; handled: default, linear, llama3"
    )
  unknown = sorted(set(merged) - set(allowed))
  missing = sorted(set(allowed) - set(merged))
  if unknown or missing:
    raise UnsupportedModelError(
      f"rope type {kind!r}: attributes {unknown} are not handled,"
      f" {missing} are missing"
    )
  rope_scaling = None
  if kind != "default":
    rope_scaling = RopeScaling(
      kind=kind, **{ours: merged[theirs] for theirs, ours in allowed.items()}
    )
  return {"rope_theta": float(theta), "rope_scaling": rope_scaling}


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
  """Every tensor of the model, keyed by Hugging Face name."""
  d = config.hidden_size
  specs = {
    "model.embed_tokens.weight": TensorSpec(
      shape=(config.vocab_size, d), kind="dense"
    ),
    "model.norm.weight": TensorSpec(shape=(d,), kind="dense"),
  }
  if not config.tie_word_embeddings:
    specs["lm_head.weight"] = TensorSpec(
      shape=(config.vocab_size, d), kind="dense"
    )
  for layer in range(config.num_layers):
    prefix = f"model.layers.{layer}"
    for norm, width in _norms(config).items():
      specs[f"{prefix}.{norm}.weight"] = TensorSpec(
        shape=(width,), kind="dense"
      )
    if config.experts is not None:
      specs[f"{prefix}.mlp.gate.weight"] = TensorSpec(
        shape=(config.experts.count, d), kind="dense"
      )
    for name, (shape, group, bias) in _projections(config).items():
      specs[f"{prefix}.{name}.weight"] = TensorSpec(
        shape=shape, kind="linear", input_group=f"{prefix}.{group}"
      )
      if bias:
        specs[f"{prefix}.{name}.bias"] = TensorSpec(
          shape=shape[:1], kind="dense"
        )
  return specs


def _norms(config: ModelConfig) -> dict[str, int]:
  """Width of each norm of a layer."""
  names = ["input_layernorm", "post_attention_layernorm"]
  if config.post_norms:
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
  norms = dict.fromkeys(names, config.hidden_size)
  if config.qk_norm:
    norms["self_attn.q_norm"] = norms["self_attn.k_norm"] = config.head_dim
  return norms


def _projections(config) -> dict[str, tuple[tuple[int, int], str, bool]]:
  """Shape, input group and whether there is a bias, of a layer's matrices."""
  d, inner = config.hidden_size, config.intermediate_size
  q = config.num_heads * config.head_dim
  kv = config.num_kv_heads * config.head_dim
  qkv_bias = config.attention_bias or config.qkv_bias
  projections = {
    "self_attn.q_proj": ((q, d), "qkv", qkv_bias),
    "self_attn.k_proj": ((kv, d), "qkv", qkv_bias),
    "self_attn.v_proj": ((kv, d), "qkv", qkv_bias),
    "self_attn.o_proj": ((d, q), "o", config.attention_bias),
  }
  experts = [""]
  if config.experts is not None:
    experts = [f"experts.{number}." for number in range(config.experts.count)]
  for expert in experts:
    projections |= {
      f"mlp.{expert}gate_proj": (
        (inner, d),
        f"{expert}gate_up",
        config.mlp_bias,
      ),
      f"mlp.{expert}up_proj": ((inner, d), f"{expert}gate_up", config.mlp_bias),
      f"mlp.{expert}down_proj": ((d, inner), f"{expert}down", config.mlp_bias),
    }
  return projections
