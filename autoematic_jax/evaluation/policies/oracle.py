"""The lowest precision that each layer needs at each step.

Paper section 2.1: along a full-precision generation, the layers of a pass are
quantized one after the other, those before at the levels chosen already, those
after in full precision. A layer takes the lowest level that keeps the next
token's distribution within a budget of the full-precision one.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import kv_cache
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.policies.passes import Pass
from autoematic_jax.evaluation.policies.passes import Session
from autoematic_jax.evaluation.policies.passes import divergence
from autoematic_jax.evaluation.policies.passes import last_hidden
from autoematic_jax.evaluation.policies.recording import Recording
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.models.layers import Precision
from autoematic_jax.models.transformer import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleOptions:
  """What the oracle may choose and must keep.

  Attributes:
    levels: Bits to choose from, ascending.
    budget: KL divergence from full precision, nats, that a layer may leave.
  """

  levels: tuple[int, ...]
  budget: float = 1e-3


def check(judged: LanguageModel, baseline: LanguageModel) -> None:
  """Refuses two models that are not one in two precisions.

  Raises:
    AutoematicError: The first is not quantized, the second is, or their shapes
      differ.
  """
  if not judged.levels:
    raise AutoematicError(
      f"the checkpoint holds {judged.format} weights: an oracle needs levels to"
      " choose from; convert it with --format autofp6"
    )
  if baseline.levels:
    raise AutoematicError(
      f"--baseline holds {baseline.format} weights: full precision needs a"
      " checkpoint that is not quantized; convert it with --format fp32"
    )
  for name in ("num_layers", "vocab_size", "hidden_size"):
    ours, theirs = (getattr(m.config, name) for m in (judged, baseline))
    if ours != theirs:
      raise AutoematicError(
        f"--baseline is another model: its {name} is {theirs}, the"
        f" checkpoint's {ours}"
      )


def trace(
  judged: LanguageModel,
  baseline: LanguageModel,
  recording: Recording,
  options: OracleOptions,
  *,
  capacity: int,
  on_pass: Callable[[Pass], Any] = lambda step: None,
) -> list[dict[str, Any]]:
  """The oracle's levels for every pass of a conversation.

  A pass reads the cache that the chosen levels of earlier passes wrote, so
  their errors add up as in a running system; layers in full precision read the
  full-precision run's own.

  Args:
    judged: The quantized model.
    baseline: The same in full precision, which wrote the answers.
    recording: The conversation.
    options: Levels and budget.
    capacity: Positions of the caches.
    on_pass: Called after each pass.

  Returns:
    For each pass `kind`, the number of its `tokens`, `levels` by layer, `kl`
    by layer (in nats, once the layer had its level; the last is that of the
    whole quantized pass) and the `entropy` of the full-precision distribution.
  """
  full = Session(baseline, capacity)
  cache = judged.init_cache(1, capacity)
  passes = []
  for step in recording.passes:
    target = full.run(step)
    cache, levels, kl = choose(
      judged.decoder,
      baseline.decoder,
      jnp.asarray(step.padded()),
      jnp.asarray([step.start], jnp.int32),
      jnp.asarray([len(step.tokens)], jnp.int32),
      cache,
      full.memory.cache,
      target.log_probabilities,
      jnp.float32(options.budget),
      levels=options.levels,
    )
    passes.append(
      {
        "kind": step.kind,
        "tokens": len(step.tokens),
        "levels": np.asarray(levels).tolist(),
        "kl": np.asarray(kl).tolist(),
        "entropy": float(target.entropy),
      }
    )
    on_pass(step)
  return passes


@partial(jax.jit, static_argnames="levels", donate_argnames="cache")
def choose(
  judged: Decoder,
  baseline: Decoder,
  tokens: Int[Array, "T"],
  start: Int[Array, "1"],
  length: Int[Array, "1"],
  cache: kv_cache.KVCache,
  full_cache: kv_cache.KVCache,
  log_p: Float[Array, "V"],
  budget: Float[Array, ""],
  *,
  levels: tuple[int, ...],
) -> tuple[kv_cache.KVCache, Int[Array, "L"], Float[Array, "L"]]:
  """Chooses the level of every layer for one pass.

  All of it is one program, so that no attempt copies a cache. An attempt
  writes its keys and values over those of the attempt before it, at the same
  layer and positions; the one that is chosen is always the last.

  Args:
    judged: The quantized decoder.
    baseline: The full-precision decoder.
    tokens: Tokens of the pass, padded at the end.
    start: Position of the first.
    length: Tokens without the padding.
    cache: The quantized run's cache; its buffers are reused.
    full_cache: The full-precision run's cache.
    log_p: Full-precision log-probabilities of the next token.
    budget: Largest KL divergence from them, nats.
    levels: Bits to choose from, ascending.

  Returns:
    The cache with this pass at the chosen levels, those levels, and the KL
    divergence once each layer had its own.
  """
  count = tokens.shape[0]
  context = judged.context(start, length, count)
  full_context = baseline.context(start, length, count)
  layers = judged.config.num_layers
  unquantized = jnp.full((1,), 32, jnp.int32)

  def finish(hidden, scratch, first):
    """KL divergence once full precision has run the layers from `first`."""

    def body(layer, carry):
      precision = Precision.of(layer, unquantized, baseline.choices)
      return baseline.layers(carry[0], full_context, carry[1], precision)

    hidden, scratch = lax.fori_loop(first, layers, body, (hidden, scratch))
    logits = baseline.logits(last_hidden(hidden, length))
    return divergence(log_p, jax.nn.log_softmax(logits[0])), scratch

  def layer_step(carry, layer):
    hidden, cache, scratch = carry

    def attempt(state):
      index, _, _, cache, scratch = state
      bits = jnp.asarray(levels, jnp.int32)[index][None]
      precision = Precision.of(layer, bits, judged.choices)
      out, cache = judged.layers(hidden, context, cache, precision)
      kl, scratch = finish(out, scratch, layer + 1)
      return index + 1, kl, out, cache, scratch

    def goes_on(state):
      tried, kl = state[:2]
      # Written so that a KL that is not a number is not within the budget.
      return (tried < len(levels)) & ~((tried > 0) & (kl <= budget))

    nothing = jnp.float32(jnp.inf)
    tried, kl, hidden, cache, scratch = lax.while_loop(
      goes_on, attempt, (jnp.int32(0), nothing, hidden, cache, scratch)
    )
    bits = jnp.asarray(levels, jnp.int32)[tried - 1]
    return (hidden, cache, scratch), (bits, kl)

  (_, cache, _), (bits, kl) = lax.scan(
    layer_step,
    (judged.embed(tokens[None]), cache, full_cache),
    jnp.arange(layers, dtype=jnp.int32),
  )
  return cache, bits, kl
