"""Windows of a calibration text."""

import numpy as np
from jaxtyping import Int

from autoematic_jax.errors import AutoematicError
from autoematic_jax.tokenizer import Tokenizer


def calibration_tokens(
  tokenizer: Tokenizer, text: str, samples: int, length: int
) -> Int[np.ndarray, "S T"]:
  """Windows spread evenly over a text.

  Args:
    tokenizer: The model's tokenizer.
    text: At least `samples * length` tokens.
    samples: Windows.
    length: Tokens of a window.

  Returns:
    `[samples, length]` token ids; windows do not overlap.

  Raises:
    AutoematicError: The text is too short, or a number is below 1.
  """
  if samples < 1 or length < 1:
    raise AutoematicError(
      f"calibration needs at least 1 sample of 1 token, not {samples} of"
      f" {length}"
    )
  ids = np.asarray(tokenizer.encode(text), np.int32)
  if ids.size < samples * length:
    raise AutoematicError(
      f"the calibration text has {ids.size} tokens; {samples} samples of"
      f" {length} need {samples * length}"
    )
  starts = np.linspace(0, ids.size - length, samples).astype(int)
  return np.stack([ids[start : start + length] for start in starts])
