"""What a decoder is made from, independent of where it came from."""

import dataclasses
import math
from typing import Any, Literal

from autoematic_jax.errors import UnsupportedModelError


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
class ModelConfig:
  """Shape and constants of one decoder-only transformer.

  Attributes:
    family: Name of the family file that describes it, such as `llama`.
    vocab_size: Rows of the embedding.
    hidden_size: Width of the residual stream.
    intermediate_size: Width of the gated MLP.
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
    for name in ("rms_norm_eps", "rope_theta"):
      value = getattr(self, name)
      if not (math.isfinite(value) and value > 0):
        raise UnsupportedModelError(f"{name}={value!r} must be > 0")

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
