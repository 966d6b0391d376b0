"""Attention of new tokens over a cache, in an order fixed by position.

On a CPU every sum over keys runs inside blocks of fixed width and then over
blocks in ascending order. Keys past a request's end weigh exactly zero, so a
request's result does not depend on how much longer its neighbours, or the
cache, are.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax.arithmetic import exact_divide
from autoematic_jax.arithmetic import ordered_max
from autoematic_jax.arithmetic import ordered_sum
from autoematic_jax.kv_cache import BLOCK

_QUERY_BLOCK = 64


def attend(
  queries: Float[Array, "B T H D"],
  keys: Float[Array, "B KV S D"],
  values: Float[Array, "B KV S D"],
  positions: Int[Array, "B T"],
  *,
  window: Int[Array, ""] | None = None,
  scale: float | None = None,
  softcap: float | None = None,
) -> Float[Array, "B T H D"]:
  """Causal attention with grouped query heads.

  Args:
    queries: New tokens' queries, after rope.
    keys: Every key of the request at its position; S is whole blocks.
    values: The matching values.
    positions: Position of each query; it sees keys up to itself.
    window: How many of these, the newest; None is all.
    scale: Factor of the queries; None is `D ** -0.5`.
    softcap: c of `c * tanh(scores / c)`, or None.

  Returns:
    Weighted values, float32.
  """
  batch, tokens, heads, dim = queries.shape
  kv_heads = keys.shape[1]
  grouped = queries.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
  # Heads that share a key become rows of one dot.
  factor: float = dim**-0.5 if scale is None else scale
  grouped = grouped.transpose(0, 2, 1, 3, 4) * factor
  block = partial(_attend_block, window=window, softcap=softcap)
  if tokens == 1:
    out = block(grouped, keys, values, positions)
  else:
    out = _attend_blocks(block, grouped, keys, values, positions)
  return out.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, heads, dim)


def _attend_blocks(attend_block, grouped, keys, values, positions):
  """Query blocks one after the other.

  Of one size, so that a query's bits do not change with how many there are,
  and small, so that scores are.
  """
  batch, kv_heads, tokens, group, dim = grouped.shape
  blocks = -(-tokens // _QUERY_BLOCK)
  pad = blocks * _QUERY_BLOCK - tokens
  grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, pad), (0, 0), (0, 0)))
  positions = jnp.pad(positions, ((0, 0), (0, pad)))
  split = grouped.reshape(batch, kv_heads, blocks, _QUERY_BLOCK, group, dim)
  out = lax.map(
    lambda block: attend_block(block[0], keys, values, block[1]),
    (
      jnp.moveaxis(split, 2, 0),
      jnp.moveaxis(positions.reshape(batch, blocks, -1), 1, 0),
    ),
  )
  out = jnp.moveaxis(out, 0, 2).reshape(batch, kv_heads, -1, group, dim)
  return out[:, :, :tokens]


# GPUs would round float32 to TF32.
_product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _attend_block(grouped, keys, values, positions, *, window, softcap):
  batch, kv_heads, tokens, group, dim = grouped.shape
  length = keys.shape[2]
  rows = grouped.reshape(batch, kv_heads, tokens * group, dim)
  scores = _product("bhrd,bhsd->bhrs", rows, keys)
  if softcap is not None:
    scores = soft_capped(scores, softcap)
  places = jnp.arange(length)[None, None]
  visible = places <= positions[..., None]
  if window is not None:
    visible &= places > positions[..., None] - window
  visible = jnp.repeat(visible, group, axis=1)[:, None]
  scores = jnp.where(visible, scores, -jnp.inf)
  weights = jnp.exp(scores - ordered_max(scores)[..., None])
  blocks = length // BLOCK
  weights = weights.reshape(batch, kv_heads, tokens * group, blocks, BLOCK)
  by_block = _product(
    "bhrks,bhksd->kbhrd",
    weights,
    values.reshape(batch, kv_heads, blocks, BLOCK, dim),
  )
  total = jnp.moveaxis(ordered_sum(weights), -1, 0)
  out, norm = _sum_blocks(by_block), _sum_blocks(total)
  out = exact_divide(out, norm[..., None])
  return out.reshape(batch, kv_heads, tokens, group, dim)


def _sum_blocks(x):
  """Sum over axis 0, on a CPU in ascending order."""
  return lax.platform_dependent(
    x, cpu=_sum_in_order, default=partial(jnp.sum, axis=0)
  )


def _sum_in_order(x):
  out = x[0]
  if x.shape[0] > 1:
    out, _ = lax.scan(lambda acc, block: (acc + block, None), out, x[1:])
  return out


def soft_capped(x: Float[Array, "*S"], cap: float) -> Float[Array, "*S"]:
  """`cap * tanh(x / cap)`: values bent into (-cap, cap)."""
  return jnp.tanh(x / cap) * cap


def rope_tables(
  positions: Int[Array, "B T"], frequencies: Float[Array | np.ndarray, "F"]
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
  """Cosines and sines of every position and frequency."""
  angle = positions[..., None].astype(jnp.float32) * frequencies
  return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
  x: Float[Array, "B T H D"],
  tables: tuple[Float[Array, "B T F"], Float[Array, "B T F"]],
) -> Float[Array, "B T H D"]:
  """Rotates the pairs (i, i + D/2) of each head."""
  cos, sin = (table[:, :, None] for table in tables)
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
