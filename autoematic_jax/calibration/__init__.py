"""Choosing a checkpoint's weights on text: refinement-aware GPTQ."""

from autoematic_jax.calibration.calibrator import Calibrator
from autoematic_jax.calibration.gptq import GptqOptions
from autoematic_jax.calibration.text import calibration_tokens

__all__ = ["Calibrator", "GptqOptions", "calibration_tokens"]
