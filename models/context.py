"""What every layer of a pass shares: positions, mask and rotary tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax.models import attention
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import RopeScaling

Rope = tuple[Float[Array, "B T F"], Float[Array, "B T F"]]

NO_WINDOW = 1 << 30
"""Window of a layer that sees every key, where other layers have one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What every layer of one pass shares.

  Attributes:
    positions: `[B, T]` position of each new token; consecutive in a row.
    token_mask: `[B, T]` False for padding.
    rope: Cosines and sines `[B, T, head_dim / 2]`.
    local_rope: Those of layers with a window, where they differ.
    config: The model's config.
  """

  positions: Int[Array, "B T"]
  token_mask: Bool[Array, "B T"]
  rope: Rope
  local_rope: Rope | None
  config: ModelConfig = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(
    cls,
    config: ModelConfig,
    positions: Int[Array, "B T"],
    token_mask: Bool[Array, "B T"],
  ) -> "Context":
    """The context of a pass over tokens at these positions."""
    local = None
    if config.local_rope_theta is not None:
      base = dataclasses.replace(
        config, rope_theta=config.local_rope_theta, rope_scaling=None
      )
      local = attention.rope_tables(positions, rope_frequencies(base))
    return cls(
      positions=positions,
      token_mask=token_mask,
      rope=attention.rope_tables(positions, rope_frequencies(config)),
      local_rope=local,
      config=config,
    )

  def rope_of(self, window: Int[Array, ""] | None) -> Rope:
    """The rope of a layer, by its window."""
    if self.local_rope is None or window is None:
      return self.rope
    return jax.tree.map(
      lambda local, full: jnp.where(window < NO_WINDOW, local, full),
      self.local_rope,
      self.rope,
    )


def rope_frequencies(config: ModelConfig) -> Float[np.ndarray, "F"]:
  """Rotary frequencies, scaled as the config says, `[head_dim / 2]`."""
  exponent = np.arange(0, config.head_dim, 2, dtype=np.float64)
  frequencies = config.rope_theta ** -(exponent / config.head_dim)
  scaling = config.rope_scaling
  if scaling is not None and scaling.kind == "linear":
    frequencies = frequencies / scaling.factor
  if scaling is not None and scaling.kind == "llama3":
    frequencies = _llama3_frequencies(frequencies, scaling)
  return frequencies.astype(np.float32)


def _llama3_frequencies(frequencies, scaling: RopeScaling):
  """Keeps short wavelengths, divides long ones, blends between."""
  wavelength = 2 * np.pi / frequencies
  positions = scaling.original_max_positions
  blend = (positions / wavelength - scaling.low_freq_factor) / (
    scaling.high_freq_factor - scaling.low_freq_factor
  )
  blend = np.clip(blend, 0.0, 1.0)
  return (1 - blend) * frequencies / scaling.factor + blend * frequencies
