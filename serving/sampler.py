"""Choosing a token from one row of logits, on the host.

Greedy requests that change nothing take the device's choice; everything that
the protocol allows besides is a few passes over one row here.
"""

from collections import Counter

import numpy as np
from jaxtyping import Float

from autoematic_jax.serving.sequences import SamplingParams
from autoematic_jax.serving.sequences import TokenLogprobs


def choose(
  logits: Float[np.ndarray, "V"], params: SamplingParams, generated: list[int]
) -> int:
  """The next token; with equal arguments always the same."""
  row = logits.astype(np.float64)
  if params.adjusts:
    _adjust(row, params, generated)
  if params.temperature == 0:
    return int(np.argmax(row))
  row = _filter(row / params.temperature, params)
  # Gumbel's trick draws without a sum whose rounding would matter.
  key = np.asarray([params.seed, params.choice], np.uint64)
  bits = np.random.Philox(key=key, counter=len(generated))
  noise = np.random.Generator(bits).gumbel(size=row.shape)
  return int(np.argmax(row + noise))


def _adjust(row, params, generated):
  for token, count in Counter(generated).items():
    row[token] -= params.presence_penalty + count * params.frequency_penalty
  for token, bias in params.logit_bias.items():
    row[token] += bias


def _filter(row, params):
  """Masks what top-k, min-p and top-p leave out."""
  if 0 < params.top_k < len(row):
    edge = np.partition(row, -params.top_k)[-params.top_k]
    row = np.where(row >= edge, row, -np.inf)
  if params.min_p > 0:
    row = np.where(row >= row.max() + np.log(params.min_p), row, -np.inf)
  if params.top_p < 1:
    order = np.argsort(-row, kind="stable")
    probabilities = np.exp(row[order] - row[order[0]])
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities) - probabilities
    row[order[before >= params.top_p]] = -np.inf
  return row


def logprobs(
  logits: Float[np.ndarray, "V"], token: int, count: int
) -> TokenLogprobs:
  """Log-probability of a token and of the `count` likeliest ones."""
  row = logits.astype(np.float64)
  row -= row.max()
  row -= np.log(np.exp(row).sum())
  # JSON has no infinities; -9999 is what others send.
  row = np.maximum(row, -9999.0)
  likeliest = np.argsort(-row, kind="stable")[:count] if count else []
  return TokenLogprobs(
    token=token,
    logprob=float(row[token]),
    top=tuple((int(t), float(row[t])) for t in likeliest),
  )
