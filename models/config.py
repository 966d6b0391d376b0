"""What a decoder is made from, independent of where it came from."""

import dataclasses
import math
from typing import Any, Literal

from autoematic_jax.errors import UnsupportedModelError

MlpActivation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Frequency scaling of rotary embeddings.

  Attributes:
    kind: `linear` divides every frequency by `factor`; `llama3` leaves high
      frequencies, divides low ones and blends between (Llama 3.1).
    factor: Divisor of the low frequencies.
    low_freq_factor: `llama3` only; wavelengths above
      `original_max_positions / low_freq_factor` are divided.
    high_freq_factor: `llama3` only; wavelengths below
      `original_max_positions / high_freq_factor` are kept.
    original_max_positions: `llama3` only; context length of pre-training.
  """

  kind: Literal["linear", "llama3"]
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_positions: int = 8192

  def __post_init__(self):
    if self.kind not in ("linear", "llama3"):
      raise UnsupportedModelError(
        f"rope scaling kind {self.kind!r} is not handled; handled:"
        " 'linear', 'llama3'"
      )
    if not self.factor >= 1:
      raise UnsupportedModelError(f"rope scaling {self.factor=} must be >= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
  """Experts in place of one gated MLP.

  Attributes:
    count: Experts of a layer.
    per_token: Those that a token runs through, of largest router probability.
    renormalize: Whether their probabilities are divided by their sum.
  """

  count: int
  per_token: int
  renormalize: bool

  def __post_init__(self):
    if not 1 <= self.per_token <= self.count:
      raise UnsupportedModelError(
        f"{self.per_token=} experts of {self.count=} cannot be chosen"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Shape and constants of one decoder-only transformer.

  Attributes:
    family: Name of the family file that describes it, such as `llama`.
    vocab_size: Rows of the embedding.
    hidden_size: Width of the residual stream.
    intermediate_size: Width of the gated MLP, or of one expert.
    num_layers: Decoder layers.
    num_heads: Query heads.
    num_kv_heads: Key / value heads; divides `num_heads`.
    head_dim: Width of one head; need not be `hidden_size / num_heads`.
    rms_norm_eps: Added to the mean square in RMSNorm.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: Frequency scaling, or None.
    max_positions: Longest context in tokens.
    tie_word_embeddings: Whether the output head is the embedding.
    attention_bias: Whether q, k, v and o carry a bias.
    mlp_bias: Whether gate, up and down carry a bias.
    qk_norm: Whether each head's queries and keys are normed before rope.
    qkv_bias: Whether q, k and v carry a bias, and o none.
    sliding_window: Newest keys that a token sees, itself included; None is all.
    full_layers: Layers that see every key although there is a window.
    local_rope_theta: Base of the rotary frequencies, unscaled, of layers with
      the window; None is that of all layers.
    query_scale: Factor of the queries; None is `head_dim ** -0.5`.
    attention_softcap: c of `c * tanh(scores / c)`, or None.
    logit_softcap: The same of the logits.
    embedding_scale: Factor of the embedding's rows on their way in.
    mlp_activation: Of the gate; `gelu_tanh` is GELU's approximation by tanh.
    post_norms: Whether the outputs of attention and MLP are normed, too.
    norms_less_one: Whether the scales of norms are stored less 1.
    experts: Experts in place of the MLP, or None.
  """

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rms_norm_eps: float = 1e-5
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling | None = None
  max_positions: int = 2048
  tie_word_embeddings: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  qkv_bias: bool = False
  sliding_window: int | None = None
  full_layers: tuple[int, ...] = ()
  local_rope_theta: float | None = None
  query_scale: float | None = None
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  embedding_scale: float = 1.0
  mlp_activation: MlpActivation = "silu"
  post_norms: bool = False
  norms_less_one: bool = False
  experts: ExpertsConfig | None = None

  def __post_init__(self):
    for name in (
      "vocab_size",
      "hidden_size",
      "intermediate_size",
      "num_layers",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "max_positions",
    ):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{name}={value!r} must be an integer >= 1")
    if self.num_heads % self.num_kv_heads:
      raise UnsupportedModelError(
        f"{self.num_heads=} must be divisible by {self.num_kv_heads=}"
      )
    if self.head_dim % 2:
      raise UnsupportedModelError(f"{self.head_dim=} must be even for rope")
    for name in (
      "rms_norm_eps",
      "rope_theta",
      "sliding_window",
      "local_rope_theta",
      "query_scale",
      "attention_softcap",
      "logit_softcap",
      "embedding_scale",
    ):
      value = getattr(self, name)
      if value is not None and not (math.isfinite(value) and value > 0):
        raise UnsupportedModelError(f"{name}={value!r} must be > 0")
    if self.mlp_activation not in ("silu", "gelu_tanh"):
      raise UnsupportedModelError(
        f"{self.mlp_activation=} must be 'silu' or 'gelu_tanh'"
      )

  def to_dict(self) -> dict[str, Any]:
    """A JSON-ready dict that `from_dict` reads back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
    """Rebuilds a config; an unknown key raises UnsupportedModelError."""
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - known)
    if unknown:
      raise UnsupportedModelError(
        f"model config has unknown keys {unknown}; written by a newer version?"
      )
    data = dict(data)
    if data.get("rope_scaling") is not None:
      data["rope_scaling"] = RopeScaling(**data["rope_scaling"])
    if data.get("experts") is not None:
      data["experts"] = ExpertsConfig(**data["experts"])
    data["full_layers"] = tuple(data.get("full_layers", ()))
    return cls(**data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
  """One tensor of a model, by its Hugging Face name.

  Attributes:
    shape: `[out, in]` for a projection.
    kind: `linear` tensors are quantized; `dense` ones keep full precision.
    input_group: Linear tensors of equal `input_group` read the same input and
      share one refinement mask; None for dense tensors.
  """

  shape: tuple[int, ...]
  kind: Literal["linear", "dense"]
  input_group: str | None = None
