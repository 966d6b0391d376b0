"""Quantizes a model layer by layer on a calibration text."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from absl import logging
from jaxtyping import Float, Int

from autoematic_jax import formats
from autoematic_jax.calibration import gptq
from autoematic_jax.calibration import hessian
from autoematic_jax.calibration import prefix
from autoematic_jax.models.builder import Tensors
from autoematic_jax.models.builder import build_layer
from autoematic_jax.models.config import ModelConfig

Weights = dict[str, np.ndarray]


@runtime_checkable
class Rounding(Protocol):
  """What a checkpoint's weights are rounded to."""

  @property
  def format(self) -> Any:
    """Format of the projections."""
    ...

  @property
  def rho(self) -> float:
    """Share of the subgroups that are refined."""
    ...

  @property
  def decoding(self) -> formats.Decoding:
    """Step of the offsets."""
    ...


class Calibrator:
  """Turns one layer after the other into packed tensors.

  Each layer is calibrated on what the layers before it, already quantized,
  make of the text; weights are quantized, activations are not. Memory is one
  layer and the hidden states of the text.

  Args:
    tokens: `[samples, T]` token ids of the text.
    damping: Share of the Hessian's mean diagonal that is added to it.
    scale_targets: See `GptqOptions`.
  """

  def __init__(
    self,
    tokens: Int[np.ndarray, "S T"],
    *,
    damping: float = 0.01,
    scale_targets: tuple[float, ...] = gptq.SCALE_TARGETS,
  ):
    self._tokens = tokens
    self._damping = damping
    self._scale_targets = scale_targets

  @property
  def method(self) -> str:
    """What a checkpoint says about how it was made."""
    samples, length = self._tokens.shape
    return (
      f"GPTQ on {samples} x {length} tokens,"
      f" {len(self._scale_targets)} scales tried"
    )

  def start(
    self,
    config: ModelConfig,
    embedding: Float[np.ndarray, "V D"],
    options: Rounding,
  ) -> None:
    """Embeds the text.

    Args:
      config: The model's config.
      embedding: Its embedding.
      options: Format, rho and decoding of the checkpoint.
    """
    self._config = config
    self._options = gptq.GptqOptions(
      format=options.format,
      rho=options.rho,
      decoding=options.decoding,
      damping=self._damping,
      scale_targets=self._scale_targets,
    )
    self._prefix = prefix.Prefix(config, self._tokens, embedding)

  def layer(
    self, weights: Weights, groups: Mapping[str, Sequence[str]]
  ) -> dict[str, formats.QTensor]:
    """Quantizes the next layer's projections and runs the text through it.

    Args:
      weights: Every tensor of the layer by name relative to the layer.
      groups: For each of `qkv`, `o`, `gate_up` and `down`, the names of the
        matrices that read that input.

    Returns:
      The packed projections, by name.
    """
    current: Tensors = dict(weights)
    packed: dict[str, formats.QTensor] = {}
    for reader in (prefix.QKV, prefix.OUTPUT, prefix.GATE_UP, prefix.DOWN):
      names = groups[reader]
      moments = self._prefix.hessian(build_layer(self._config, current), reader)
      tensors = self._quantize([weights[n] for n in names], moments, names)
      for name, tensor in zip(names, tensors, strict=True):
        packed[name] = tensor
        current[name] = np.asarray(formats.dequantize(tensor))
      if reader == prefix.OUTPUT:
        self._prefix.pass_attention(build_layer(self._config, current))
      if reader == prefix.DOWN:
        self._prefix.pass_mlp(build_layer(self._config, current))
    return packed

  def _quantize(self, weights, moments, names):
    factor = hessian.factor(moments, self._options.damping)
    if factor is not None:
      if factor.damping > self._options.damping:
        logging.warning(
          "%s: damping raised to %g of the mean diagonal",
          ", ".join(names),
          factor.damping,
        )
      return gptq.quantize_jointly(weights, factor, self._options)
    logging.warning(
      "%s: the inputs' Hessian has no Cholesky factor even with damping;"
      " rounded to nearest",
      ", ".join(names),
    )
    return formats.quantize_weights(
      weights,
      format=self._options.format,
      rho=self._options.rho,
      decoding=self._options.decoding,
    )
