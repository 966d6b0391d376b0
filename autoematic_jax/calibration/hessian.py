"""Second moments of a layer's inputs, and the factor that GPTQ needs."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
  """The inverse Hessian of one layer's inputs, factored.

  Attributes:
    upper: `[K, K]` float32, upper triangular, `upper.T @ upper = H^-1`.
    damped: `[K, K]` float32 H, damped.
    diagonal: `[K]` float64 diagonal of H before damping: mean squares.
    damping: Share of the mean diagonal that was added.
  """

  upper: np.ndarray
  damped: np.ndarray
  diagonal: np.ndarray
  damping: float


class Moments:
  """Sums of `x x^T` and, where targets are given, of `x t^T`.

  x is an input as the quantized model makes it, t the same input in full
  precision.
  """

  def __init__(self, columns: int):
    self._second = _Sum.zero(columns)
    self._cross = _Sum.zero(columns)
    self._rows = 0

  def add(
    self, x: Float[Array, "M K"], target: Float[Array, "M K"] | None = None
  ) -> None:
    """Adds a batch, on the device."""
    self._second = _add_product(self._second, x, x)
    if target is not None:
      self._cross = _add_product(self._cross, x, target)
    self._rows += x.shape[0]

  @property
  def hessian(self) -> Float[np.ndarray, "K K"]:
    """Mean of `x x^T`, float64."""
    return self._second.exact() / max(self._rows, 1)

  @property
  def cross(self) -> Float[np.ndarray, "K K"]:
    """Mean of `x t^T`, float64; 0 without targets."""
    return self._cross.exact() / max(self._rows, 1)

  @property
  def finite(self) -> bool:
    """Whether neither sum holds NaN or Inf."""
    sums = (self._second.total, self._cross.total)
    return all(bool(jnp.isfinite(total).all()) for total in sums)


class _Sum(NamedTuple):
  """A float32 sum, and what its additions lost (Kahan's summation)."""

  total: Float[Array, "K K"]
  lost: Float[Array, "K K"]

  @classmethod
  def zero(cls, columns):
    # Two arrays, as each is given up to the next addition.
    shape = (columns, columns)
    return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

  def exact(self):
    """The sum in float64."""
    total = np.asarray(self.total, np.float64)
    return total - np.asarray(self.lost, np.float64)


@partial(jax.jit, donate_argnums=0)
def _add_product(old, x, y):
  added = jnp.matmul(x.T, y, precision=jax.lax.Precision.HIGHEST) - old.lost
  total = old.total + added
  return _Sum(total, (total - old.total) - added)


def corrected(
  weights: Sequence[Float[np.ndarray, "_ K"]],
  second: Float[np.ndarray, "K K"],
  cross: Float[np.ndarray, "K K"],
  damping: float,
) -> list[Float[np.ndarray, "_ K"]]:
  """Weights for the inputs that the quantized model has.

  Their outputs on these are nearest to those of the given weights on
  full-precision inputs: `argmin_V |V x - W t|^2 + c |V - W|^2`, by row, with
  c the damping times the mean diagonal of H.

  Args:
    weights: W of each matrix that reads the input.
    second: Mean of `x x^T`: H.
    cross: Mean of `x t^T`.
    damping: How firmly the result is held to W.

  Returns:
    V of each matrix, float32.
  """
  held = damping * second.diagonal().mean() * np.eye(len(second))
  rows = np.concatenate([np.asarray(w, np.float64) for w in weights])
  found = np.linalg.solve(second + held, (cross + held) @ rows.T).T
  ends = np.cumsum([len(w) for w in weights])[:-1]
  return np.split(found.astype(np.float32), ends)


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
        upper=upper.astype(np.float32),
        damped=damped.astype(np.float32),
        diagonal=diagonal,
        damping=share,
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
