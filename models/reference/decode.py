"""Greedy answers to many prompts at once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from autoematic_jax.models.reference import network
from autoematic_jax.models.reference.network import NetworkConfig
from autoematic_jax.models.reference.network import Params


@functools.partial(
  jax.jit, static_argnames=("config", "new_tokens", "end", "dtype")
)
def greedy(
  params: Params,
  prompts: Int[Array, "B P"],
  lengths: Int[Array, "B"],
  *,
  config: NetworkConfig,
  new_tokens: int,
  end: int,
  dtype: DTypeLike = jnp.bfloat16,
) -> Int[Array, "B N"]:
  """The likeliest token after each, until `end`.

  Args:
    params: Weights.
    prompts: Padded at the end with anything.
    lengths: Tokens of each prompt.
    config: Sizes.
    new_tokens: Tokens of the longest answer.
    end: Ends an answer.
    dtype: To compute in.

  Returns:
    Answers, filled up with `end`.
  """
  weights = network.cast(params["layers"], dtype)
  hidden, cache = _prefill(
    params, weights, prompts, config, prompts.shape[1] + new_tokens, dtype
  )
  rows = jnp.arange(prompts.shape[0])
  last = hidden[rows, lengths - 1]
  token = network.head(params, last, config).argmax(-1).astype(jnp.int32)
  answers = jnp.full((prompts.shape[0], new_tokens), end, jnp.int32)

  def more(carry):
    step, token, _, _ = carry
    return (step < new_tokens) & (token != end).any()

  def body(carry):
    step, token, cache, answers = carry
    answers = answers.at[:, step].set(token)
    hidden, cache = _step(
      params, weights, token, lengths + step, cache, config, dtype
    )
    found = network.head(params, hidden, config).argmax(-1)
    token = jnp.where(token == end, end, found.astype(jnp.int32))
    return step + 1, token, cache, answers

  *_, answers = lax.while_loop(more, body, (0, token, cache, answers))
  return answers


def _prefill(params, weights, prompts, config, length, dtype):
  """Hidden states of the prompts, and keys and values with room for more."""
  positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
  rope = network.rope_tables(positions, config)
  room = ((0, 0), (0, length - prompts.shape[1]), (0, 0), (0, 0))

  def attend(q, k, v):
    mixed = jax.nn.dot_product_attention(
      q, k, v, is_causal=True, implementation="xla"
    )
    # What padding leaves here is overwritten before anything may see it.
    return mixed, (jnp.pad(k, room), jnp.pad(v, room))

  def body(hidden, layer):
    return network.run_layer(layer, hidden, rope, config, attend)

  return lax.scan(body, network.embed(params, prompts, dtype), weights)


def _step(params, weights, token, position, cache, config, dtype):
  """Hidden state of one more token a row, and the cache with it."""
  rope = network.rope_tables(position[:, None], config)
  rows = jnp.arange(token.shape[0])
  seen = jnp.arange(cache[0].shape[2]) <= position[:, None]

  def body(hidden, layer):
    weights, keys, values = layer

    def attend(q, k, v):
      all_keys = keys.at[rows, position].set(k[:, 0])
      all_values = values.at[rows, position].set(v[:, 0])
      mixed = jax.nn.dot_product_attention(
        q,
        all_keys,
        all_values,
        mask=seen[:, None, None],
        implementation="xla",
      )
      return mixed, (all_keys, all_values)

    return network.run_layer(weights, hidden, rope, config, attend)

  hidden = network.embed(params, token[:, None], dtype)
  hidden, cache = lax.scan(body, hidden, (weights, *cache))
  return hidden[:, 0], cache
