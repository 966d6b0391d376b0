"""Intervals of means by resampling."""

import numpy as np
from jaxtyping import Float

_RESAMPLES = 2000


def mean_interval(
  values: Float[np.ndarray, "N"],
) -> Float[np.ndarray, "2"]:
  """95% percentile interval of a mean over independent values.

  The draws depend on nothing but how many values there are, so that the same
  values give the same interval.
  """
  rng = np.random.default_rng(0)
  picks = rng.integers(0, len(values), (_RESAMPLES, len(values)))
  return np.quantile(values[picks].mean(1), [0.025, 0.975])
