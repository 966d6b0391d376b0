"""Choosing the next token, one request independent of the others."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.arithmetic import exact_divide
from autoematic_jax.arithmetic import softmax
from autoematic_jax.errors import PromptError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
  """How one request samples.

  Attributes:
    temperature: 0 takes the most likely token.
    top_k: Only the k most likely tokens; 0 keeps all.
    top_p: Only the most likely tokens that together reach this probability.
    seed: Two requests of equal prompt and seed give the same tokens.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self):
    if not 0.0 <= self.temperature < float("inf"):
      raise PromptError(f"temperature={self.temperature} must be >= 0")
    if self.top_k < 0:
      raise PromptError(f"top_k={self.top_k} must be >= 0 (0 keeps all)")
    if not 0.0 < self.top_p <= 1.0:
      raise PromptError(f"top_p={self.top_p} must be in (0, 1]")
    if not 0 <= self.seed < 2**32:
      raise PromptError(f"seed={self.seed} must be in [0, 2**32)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingArrays:
  """SamplingConfig of a batch as arrays `[B]`."""

  temperature: Float[Array, "B"]
  top_k: Int[Array, "B"]
  top_p: Float[Array, "B"]
  seed: Int[Array, "B"]

  @classmethod
  def of(cls, configs: list[SamplingConfig]) -> "SamplingArrays":
    """Stacks the configs of a batch."""
    return cls(
      temperature=jnp.asarray([c.temperature for c in configs], jnp.float32),
      top_k=jnp.asarray([c.top_k for c in configs], jnp.int32),
      top_p=jnp.asarray([c.top_p for c in configs], jnp.float32),
      seed=jnp.asarray([c.seed for c in configs], jnp.uint32),
    )


def sample(
  logits: Float[Array, "B V"],
  sampling: SamplingArrays,
  positions: Int[Array, "B"],
  *,
  greedy: bool,
) -> Int[Array, "B"]:
  """Draws the next token of each request.

  Args:
    logits: Next-token logits.
    sampling: The requests' settings.
    positions: Position of the token to draw; with the seed it fixes the
      random numbers, whatever the batch.
    greedy: Every request has temperature 0, known at compile time.

  Returns:
    `[B]` int32 tokens.
  """
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  if greedy:
    return best
  temperature = jnp.maximum(sampling.temperature, 1e-6)[:, None]
  filtered = _filter(exact_divide(logits, temperature), sampling)
  drawn = [
    jax.random.categorical(
      jax.random.fold_in(jax.random.key(sampling.seed[i]), positions[i]),
      filtered[i],
    )
    for i in range(logits.shape[0])
  ]
  drawn = jnp.stack(drawn).astype(jnp.int32)
  return jnp.where(sampling.temperature > 0, drawn, best)


def _filter(logits, sampling):
  """Masks what top-k and top-p leave out, ties at the edge kept."""
  vocab = logits.shape[-1]
  ordered = jnp.sort(logits, axis=-1, descending=True)
  k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)
  k = jnp.minimum(k, vocab)
  kth = jnp.take_along_axis(ordered, (k - 1)[:, None], axis=-1)
  ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
  probabilities = softmax(ordered)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  kept = jnp.sum(before < sampling.top_p[:, None], axis=-1)
  last = jnp.take_along_axis(ordered, (kept - 1)[:, None], axis=-1)
  return jnp.where(logits >= jnp.maximum(kth, last), logits, -jnp.inf)
