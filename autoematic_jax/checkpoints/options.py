"""What a checkpoint is made as."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from autoematic_jax import formats
from autoematic_jax.checkpoints import layout
from autoematic_jax.errors import PrecisionError
from autoematic_jax.policy import PolicyConfig

_DENSE_DTYPES = {
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
  "float32": np.dtype(np.float32),
}

# A dense format fixes the dtype of every tensor.
_FIXED_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
  """Format of a checkpoint and its parameters, checked.

  Attributes:
    format: `autofp6`, `autofp8`, `nvfp4`, `fp6g`, `bf16` or `fp32`.
    rho: Share of weight subgroups that are refined (autofp6, autofp8).
    decoding: Step of the offsets, `exponent` or `fixed`.
    levels: Levels that the checkpoint offers; None takes those of the format.
    dense_dtype: Of tensors that are not quantized, `bfloat16` or `float32`;
      None takes float32 for fp32 and bfloat16 otherwise.
    policy: Fields of the run-time policy that differ from their defaults.
  """

  format: str = "autofp6"
  rho: float = 0.2
  decoding: formats.Decoding = "exponent"
  levels: tuple[int, ...] | None = None
  dense_dtype: str | None = None
  policy: Mapping[str, Any] | None = None

  def __post_init__(self):
    _one_of("format", self.format, layout.FORMATS)
    _one_of("decoding", self.decoding, ("exponent", "fixed"))
    if not 0 <= self.rho <= 0.5:
      raise PrecisionError(
        f"rho={self.rho} must be in [0, 0.5]: at most 2 of the 4 subgroups of"
        " a group are refined"
      )
    self._check_levels()
    self._check_dense_dtype()
    if self.policy and not self.offered_levels:
      raise PrecisionError(
        f"a {self.format} checkpoint offers no levels for a policy to choose"
      )
    self.policy_dict()

  def _check_levels(self):
    held, levels = formats.LEVELS.get(self.format, ()), self.offered_levels
    ascending = list(levels) == sorted(set(levels))
    if not set(levels) <= set(held) or not ascending:
      raise PrecisionError(
        f"levels {levels} must be ascending and out of {held}, which"
        f" {self.format} holds"
      )
    if held and not levels:
      raise PrecisionError(f"levels is empty; {self.format} holds {held}")

  def _check_dense_dtype(self):
    if self.dense_dtype is None:
      return
    _one_of("dense_dtype", self.dense_dtype, tuple(_DENSE_DTYPES))
    fixed = _FIXED_DTYPES.get(self.format, self.dense_dtype)
    if self.dense_dtype != fixed:
      raise PrecisionError(
        f"a {self.format} checkpoint stores {fixed}, not"
        f" dense_dtype={self.dense_dtype!r}"
      )

  @property
  def offered_levels(self) -> tuple[int, ...]:
    """Levels that the checkpoint offers."""
    if self.levels is None:
      return layout.DEFAULT_LEVELS[self.format]
    return self.levels

  @property
  def dense(self) -> np.dtype:
    """Dtype of tensors that are not quantized."""
    name = self.dense_dtype or _FIXED_DTYPES.get(self.format, "bfloat16")
    return _DENSE_DTYPES[name]

  def policy_dict(self) -> dict[str, Any] | None:
    """Every field of the policy; None for an unquantized checkpoint.

    Raises:
      PrecisionError: A field is unknown, or asks for a level that is not
        offered.
    """
    if not self.offered_levels:
      return None
    fields = {"levels": self._default_levels(), **(self.policy or {})}
    config = PolicyConfig.from_dict(fields)
    if not set(config.levels) <= set(self.offered_levels):
      raise PrecisionError(
        f"the policy's levels {config.levels} are not all offered by the"
        f" checkpoint, which offers {self.offered_levels}"
      )
    return config.to_dict()

  def _default_levels(self):
    """What is offered, 2 bits left out where there are others.

    Few models bear them, and only `autoematic profile` can tell which.
    """
    levels = self.offered_levels
    return tuple(level for level in levels if level > 2) or levels


def _one_of(name, value, known):
  if value not in known:
    raise PrecisionError(
      f"{name} {value!r} is unknown; known: {', '.join(known)}"
    )
