"""How well a model predicts a text, and how close it stays to another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from autoematic_jax.models.transformer import Decoder

_ROWS_AT_ONCE = 64
"""Positions whose logits are held at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextScores:
  """Scores of every predicted token of a window.

  Attributes:
    nll: `[T - 1]` negative log-likelihood, nats.
    kl: `[T - 1]` KL divergence from the reference's next-token
      distribution to this one's, nats.
    agree: `[T - 1]` whether both have the same most likely token.
  """

  nll: np.ndarray
  kl: np.ndarray
  agree: np.ndarray


def score(
  decoder: Decoder,
  hidden: Float[Array, "T D"],
  reference: Decoder,
  reference_hidden: Float[Array, "T D"],
  tokens: Int[Array, "T"],
) -> TextScores:
  """Scores each token after the first from the hidden state before it.

  Args:
    decoder: The model that is judged.
    hidden: Its hidden states before the final norm.
    reference: The full-precision model.
    reference_hidden: Its hidden states.
    tokens: The text.

  Returns:
    Scores by position.
  """
  parts = []
  last = tokens.shape[0] - 1
  for start in range(0, last, _ROWS_AT_ONCE):
    rows = slice(start, min(start + _ROWS_AT_ONCE, last))
    parts.append(
      _score_rows(
        decoder,
        hidden[rows],
        reference,
        reference_hidden[rows],
        tokens[rows.start + 1 : rows.stop + 1],
      )
    )
  nll, kl, agree = map(np.concatenate, zip(*parts, strict=True))
  return TextScores(nll=nll, kl=kl, agree=agree)


@jax.jit
def _score_rows(decoder, hidden, reference, reference_hidden, targets):
  log_q = jax.nn.log_softmax(_logits(decoder, hidden))
  log_p = jax.nn.log_softmax(_logits(reference, reference_hidden))
  nll = -jnp.take_along_axis(log_q, targets[:, None], axis=1)[:, 0]
  kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=1)
  agree = jnp.argmax(log_p, axis=1) == jnp.argmax(log_q, axis=1)
  return nll, kl, agree


def log_likelihoods(
  decoder: Decoder,
  hidden: Float[Array, "T D"],
  tokens: Int[Array, "T"],
  first: int,
  last: int,
) -> np.ndarray:
  """Log-likelihoods, in nats, of a piece of a text given what precedes it.

  Args:
    decoder: The model that is judged.
    hidden: Its hidden states before the final norm.
    tokens: The text; may be padded at the end.
    first: Position of the piece's first token, at least 1.
    last: Position after its last token.

  Returns:
    `[last - first]` values.
  """
  parts = [
    _likelihoods(decoder, hidden, tokens, jnp.asarray(start))
    for start in range(first - 1, last - 1, _ROWS_AT_ONCE)
  ]
  return np.concatenate(parts)[: last - first]


@jax.jit
def _likelihoods(decoder, hidden, tokens, start):
  # As many rows whatever the piece, so that a text's length decides alone
  # what is compiled; those past the end are cut off by the caller.
  rows = start + jnp.arange(_ROWS_AT_ONCE)
  log_q = jax.nn.log_softmax(_logits(decoder, hidden.at[rows].get(mode="clip")))
  targets = tokens.at[rows + 1].get(mode="clip")
  return jnp.take_along_axis(log_q, targets[:, None], axis=1)[:, 0]


def _logits(decoder, hidden):
  return decoder.logits(hidden, one_by_one=False)
