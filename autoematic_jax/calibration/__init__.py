"""Choosing a checkpoint's weights on text: refinement-aware GPTQ."""

from autoematic_jax.calibration.calibrator import Calibrator
from autoematic_jax.calibration.groups import SCALE_TARGETS
from autoematic_jax.calibration.groups import GptqOptions
from autoematic_jax.calibration.text import calibration_tokens

__all__ = [
  "SCALE_TARGETS",
  "Calibrator",
  "GptqOptions",
  "calibration_tokens",
]
