"""The two signals that the policy reads off a running model (paper 3.1)."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from autoematic_jax.arithmetic import ordered_sum
from autoematic_jax.arithmetic import softmax

Reduction = Literal["frobenius", "token_mean", "token_median"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


def layer_update_activity(
  before: Float[Array, "B T D"],
  after: Float[Array, "B T D"],
  token_mask: Bool[Array, "B T"],
  *,
  reduction: Reduction = "frobenius",
  epsilon: float = 1e-6,
) -> Float[Array, "B"]:
  """How much a layer changed each request's hidden states (equation 1).

  Args:
    before: Hidden states that entered the layer.
    after: Hidden states that left it.
    token_mask: The request's own tokens of this pass; padding comes last and
      adds exact zeros.
    reduction: `frobenius` takes the norms over all tokens together,
      `token_mean` and `token_median` the mean and the median (of an even
      number, the lower of the middle two) of the tokens' own ratios. The first
      two follow single tokens, such as one that a layer blows up; the median
      does not.
    epsilon: Added to the norm of `before`.

  Returns:
    `||after - before|| / (||before|| + epsilon)`.
  """
  before = before.astype(jnp.float32)
  change = ordered_sum(jnp.square(after.astype(jnp.float32) - before))
  size = ordered_sum(jnp.square(before))
  if reduction != "frobenius":
    ratio = jnp.sqrt(change) / (jnp.sqrt(size) + epsilon)
    count = jnp.maximum(jnp.sum(token_mask, axis=1), 1)
    if reduction == "token_mean":
      return ordered_sum(jnp.where(token_mask, ratio, 0.0)) / count
    # Padding comes last, where NaN goes as well.
    ordered = jnp.sort(jnp.where(token_mask, ratio, jnp.nan), axis=1)
    middle = (count - 1) // 2
    return jnp.take_along_axis(ordered, middle[:, None], axis=1)[:, 0]
  change = ordered_sum(jnp.where(token_mask, change, 0.0))
  size = ordered_sum(jnp.where(token_mask, size, 0.0))
  return jnp.sqrt(change) / (jnp.sqrt(size) + epsilon)


def topk_entropy(logits: Float[Array, "B V"], k: int) -> Float[Array, "B"]:
  """Entropy of the softmax over the k largest logits, divided by log k.

  Args:
    logits: Next-token logits; NaN gives NaN.
    k: Tokens that count; no more than the vocabulary.

  Returns:
    Values in [0, 1].
  """
  k = min(k, logits.shape[-1])
  if k == 1:
    return jnp.zeros(logits.shape[:-1], jnp.float32)
  p = softmax(_largest(logits.astype(jnp.float32), k))
  # log(p) would be -inf where p underflows; there p * log(p) is 0.
  terms = jnp.where(p == 0, 0.0, p * jnp.log(p))
  entropy = -ordered_sum(terms) / np.log(k)
  return jnp.clip(entropy, 0.0, 1.0)


_ROWS, _MOST_COLUMNS = 64, 1000


def _largest(x, k):
  """The k largest values, in order.

  They lie in the k columns of the largest maxima: sorting those costs a
  hundredth of sorting a vocabulary. Past 1000 columns a GPU would take 70
  microseconds; there, more rows leave fewer.
  """
  rows = max(_ROWS, -(-x.shape[-1] // _MOST_COLUMNS))
  columns = -(-x.shape[-1] // rows)
  if columns <= k:
    return jax.lax.top_k(x, k)[0]
  missing = columns * rows - x.shape[-1]
  pad = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
  table = jnp.pad(x, pad, constant_values=-jnp.inf)
  table = table.reshape(*x.shape[:-1], rows, columns)
  _, best = jax.lax.top_k(jnp.max(table, axis=-2), k)
  some = jnp.take_along_axis(table, best[..., None, :], axis=-1)
  some = some.reshape(*x.shape[:-1], -1)
  if some.shape[-1] > _MOST_COLUMNS:
    return _largest(some, k)
  return jax.lax.top_k(some, k)[0]
