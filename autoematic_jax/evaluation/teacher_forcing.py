"""Hidden states of a given text, at any precision, in both phases."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import kv_cache
from autoematic_jax import policy as policy_lib
from autoematic_jax import signals
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.models.transformer import Decoder

Mode = Literal["prefill", "decode"]

DECODE_PREFIX = 16
"""Tokens that go through prefill before a text is decoded token by token."""


def hidden_states(
  model: LanguageModel,
  tokens: Int[Array, "T"],
  forced: Int[Array | np.ndarray, "L"],
  mode: Mode,
) -> tuple[Float[Array, "T D"], Int[Array, "S L"]]:
  """Runs one text and keeps what the output head would see.

  Args:
    model: A loaded checkpoint.
    tokens: The text; longer than DECODE_PREFIX.
    forced: Bits of each layer, or ADAPTIVE where the policy decides.
    mode: `prefill` runs the text in one pass; `decode` feeds it token by
      token, as generation would have, after a short prefix.

  Returns:
    Hidden states before the final norm, and the bits of each layer in the
    one pass or in every decode step.
  """
  if mode == "prefill":
    return one_pass(model, tokens, tokens.shape[0], forced)
  cache = model.init_cache(1, tokens.shape[0])
  levels = jnp.asarray(forced)
  return _decode(model.decoder, tokens, cache, levels, policy=model.policy)


def one_pass(
  model: LanguageModel,
  tokens: Int[Array, "T"],
  length: int,
  forced: Int[Array | np.ndarray, "L"],
) -> tuple[Float[Array, "T D"], Int[Array, "1 L"]]:
  """Runs one text, of which only the first tokens count, in one pass.

  Texts of several lengths share a compiled program where they are padded to
  the same one; what pads them changes nothing before it.

  Args:
    model: A loaded checkpoint.
    tokens: The text, padded at the end with anything.
    length: Tokens before the padding.
    forced: Bits of each layer, or ADAPTIVE where the policy decides.

  Returns:
    Hidden states before the final norm, and the bits of each layer.
  """
  cache = model.init_cache(1, tokens.shape[0])
  return _prefill(
    model.decoder,
    tokens,
    jnp.asarray([length], jnp.int32),
    cache,
    jnp.asarray(forced),
    policy=model.policy,
  )


@partial(jax.jit, static_argnames="policy")
def _prefill(
  decoder: Decoder,
  tokens: Int[Array, "T"],
  length: Int[Array, "1"],
  cache: kv_cache.Cache,
  forced: Int[Array, "L"],
  *,
  policy: policy_lib.PolicyConfig,
):
  hidden, _, bits = _pass(decoder, tokens, length, cache, forced, policy)
  return hidden, bits.T


def _pass(decoder, tokens, length, cache, forced, policy):
  hidden, cache, _, trace = decoder.run_layers(
    tokens[None],
    start=jnp.zeros((1,), jnp.int32),
    lengths=length,
    cache=cache,
    policy=policy_lib.start_prefill(policy, 1),
    forced=forced,
    policy_config=policy,
    phase="prefill",
  )
  return hidden[0], cache, trace.bits


@partial(jax.jit, static_argnames="policy")
def _decode(
  decoder: Decoder,
  tokens: Int[Array, "T"],
  cache: kv_cache.Cache,
  forced: Int[Array, "L"],
  *,
  policy: policy_lib.PolicyConfig,
):
  prefix, rest = tokens[:DECODE_PREFIX], tokens[DECODE_PREFIX:]
  length = jnp.full((1,), DECODE_PREFIX, jnp.int32)
  first, cache, _ = _pass(decoder, prefix, length, cache, forced, policy)

  def entropy(hidden):
    return signals.topk_entropy(decoder.logits(hidden), policy.entropy_top_k)

  def step(carry, inputs):
    cache, state, uncertainty = carry
    token, position = inputs
    hidden, cache, state, trace = decoder.run_layers(
      token[None, None],
      start=position[None],
      lengths=jnp.ones((1,), jnp.int32),
      cache=cache,
      policy=policy_lib.start_step(policy, state, uncertainty),
      forced=forced,
      policy_config=policy,
      phase="decode",
    )
    last = hidden[:, 0]
    return (cache, state, entropy(last)), (last[0], trace.bits[:, 0])

  start = (cache, policy_lib.start_decode(policy, 1), entropy(first[-1:]))
  positions = jnp.arange(DECODE_PREFIX, tokens.shape[0], dtype=jnp.int32)
  _, (hidden, bits) = lax.scan(step, start, (rest, positions))
  return jnp.concatenate([first, hidden]), bits
