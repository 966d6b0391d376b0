"""Which loaded model runs each precision of an evaluation."""

from typing import Any

from autoematic_jax.errors import AutoematicError
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.language_model import load
from autoematic_jax.precisions import DENSE_DTYPES
from autoematic_jax.precisions import forced_levels
from autoematic_jax.precisions import parse_precision


class Contenders:
  """A checkpoint and its unquantized baseline, loaded once it is needed.

  Args:
    model: The checkpoint that is judged.
    checkpoint: Its directory.
    baseline: Directory of an unquantized checkpoint of the same model; None
      takes the checkpoint's own weights, dequantized.
  """

  def __init__(
    self, model: LanguageModel, checkpoint: str, baseline: str | None
  ):
    self.model = model
    self._checkpoint = checkpoint
    self._baseline = baseline
    self._dense: dict[str, LanguageModel] = {}

  def check(self, precision: str) -> None:
    """Refuses what no model here can run.

    Raises:
      AutoematicError: The checkpoint does not offer the precision, or it is
        `bf16`, which would round again what is quantized, without a baseline.
    """
    if precision not in DENSE_DTYPES:
      forced_levels(self.model, parse_precision(precision))
    unquantized = self._baseline is not None or not self.model.levels
    if precision == "bf16" and not unquantized:
      raise AutoematicError(
        f"--precisions {precision} needs --baseline; without one the reference"
        " is fp32"
      )

  def of(self, precision: str) -> LanguageModel:
    """Who runs a precision: `fp32` and `bf16` are the baseline's."""
    if precision not in DENSE_DTYPES:
      return self.model
    if precision not in self._dense:
      self._dense[precision] = load(
        self._baseline or self._checkpoint,
        compute_dtype=DENSE_DTYPES[precision],
        dense=self._baseline is None,
      )
    return self._dense[precision]

  def describe(self, precision: str) -> dict[str, Any]:
    """The fields that begin a precision's row."""
    judged = self.of(precision)
    return {
      "precision": precision,
      "format": judged.format,
      "stored_bits": judged.stored_bits,
    }
