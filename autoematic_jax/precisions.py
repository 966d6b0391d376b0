"""Names of precisions, and the bits of each layer that they stand for."""

from collections.abc import Sequence

import numpy as np

from autoematic_jax.errors import PrecisionError
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.models.transformer import ADAPTIVE

Precision = str | int | Sequence[int]

DENSE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Unquantized precisions and the dtype of their projections."""

_DENSE_BITS = {"fp32": 32, "bf16": 16}


def parse_precision(text: str | None) -> str | int | list[int] | None:
  """`adaptive`, `bf16`, `fp32`, one level, or a level for each layer.

  Raises:
    PrecisionError: The text is none of these.
  """
  if text is None or text in ("adaptive", *DENSE_DTYPES):
    return text
  try:
    levels = [int(part) for part in text.split(",")]
  except ValueError:
    raise PrecisionError(
      f"--precision {text!r}: expected adaptive, bf16, fp32, a number of"
      " bits, or one number for each layer separated by commas"
    ) from None
  return levels if "," in text else levels[0]


def forced_levels(
  model: LanguageModel, precision: Precision | None
) -> np.ndarray:
  """Bits of each layer, or ADAPTIVE everywhere, as `[layers]` int32.

  Raises:
    PrecisionError: The checkpoint does not offer this precision.
  """
  layers = model.config.num_layers
  offered = model.precisions
  if precision is None:
    precision = offered[0]
  if isinstance(precision, str) and precision.isdecimal():
    precision = int(precision)
  if isinstance(precision, str | int | np.integer):
    if precision not in offered:
      raise PrecisionError(
        f"precision {precision!r} is not offered by this {model.format}"
        f" checkpoint; offered: {', '.join(map(str, offered))}"
      )
    if precision == "adaptive":
      return np.full((layers,), ADAPTIVE, np.int32)
    bits = _DENSE_BITS[precision] if isinstance(precision, str) else precision
    return np.full((layers,), bits, np.int32)
  levels = np.asarray(list(precision), np.int32)
  unknown = sorted(set(levels.tolist()) - set(model.levels))
  if levels.shape != (layers,) or unknown:
    raise PrecisionError(
      f"a level for each layer needs {layers} values out of {model.levels};"
      f" got {len(levels)} values, {unknown} not offered"
    )
  return levels
