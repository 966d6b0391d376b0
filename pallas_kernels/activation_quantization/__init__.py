"""Quantization of activation rows with run-time refinement masks."""

from autoematic_jax.pallas_kernels.activation_quantization.api import PAPER
from autoematic_jax.pallas_kernels.activation_quantization.api import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization.api import (
  QuantizedRows,
)
from autoematic_jax.pallas_kernels.activation_quantization.api import (
  quantize_rows,
)

__all__ = ["PAPER", "ActivationConfig", "QuantizedRows", "quantize_rows"]
