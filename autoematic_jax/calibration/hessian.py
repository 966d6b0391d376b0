"""Second moments of a layer's inputs, and the factor that GPTQ needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
  """The inverse Hessian of one layer's inputs, factored.

  Attributes:
    upper: `[K, K]` float32, upper triangular, `upper.T @ upper = H^-1`.
    diagonal: `[K]` float64 diagonal of H before damping: mean squares.
    damping: Share of the mean diagonal that was added.
  """

  upper: np.ndarray
  diagonal: np.ndarray
  damping: float


class HessianSum:
  """`mean(x x^T)` over inputs that come in batches."""

  def __init__(self, columns: int):
    self._sum = np.zeros((columns, columns))
    self._rows = 0

  def add(self, x: Float[Array, "M K"]) -> None:
    """Adds a batch; sums are float32 within it and float64 across batches."""
    self._sum += np.asarray(_outer(x), np.float64)
    self._rows += x.shape[0]

  def mean(self) -> Float[np.ndarray, "K K"]:
    """The mean so far, float64."""
    return self._sum / max(self._rows, 1)


@jax.jit
def _outer(x):
  return jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)


def factor(
  hessian: Float[np.ndarray, "K K"], damping: float = 0.01
) -> Factor | None:
  """Upper Cholesky factor of the damped inverse.

  A channel that no input reached (diagonal 0) is given a diagonal of the mean
  and stays apart from the others: it is rounded as it is.

  Args:
    hessian: Mean of `x x^T`.
    damping: Share of the mean diagonal to add; ten times more, up to three
      times, where the matrix is not positive definite.

  Returns:
    The factor, or None where no damping helped.
  """
  diagonal = hessian.diagonal().copy()
  dead = diagonal <= 0
  live = diagonal[~dead]
  scale = live.mean() if live.size else 1.0
  for attempt in range(4):
    share = damping * 10.0**attempt
    damped = hessian.copy()
    damped[np.diag_indices_from(damped)] += share * scale
    damped[dead, dead] = scale
    try:
      upper = _inverse_factor(damped)
    except np.linalg.LinAlgError:
      continue
    if np.isfinite(upper).all():
      return Factor(
        upper=upper.astype(np.float32), diagonal=diagonal, damping=share
      )
  return None


def _inverse_factor(h):
  """U with `U.T @ U = h^-1`, from the factor of h in reversed order.

  With J the reversal, `J h J = L L^T` gives `h^-1 = (J L^-1 J)^T (J L^-1 J)`,
  and `J L^-1 J` is upper triangular: no inverse is factored.
  """
  lower = np.linalg.cholesky(h[::-1, ::-1])
  inverse = np.linalg.solve(lower, np.eye(len(h)))
  return np.triu(inverse[::-1, ::-1])
