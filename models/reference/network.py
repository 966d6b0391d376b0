"""A decoder of the Qwen3 kind, as pure functions of a tree of arrays.

Weights are kept in float32 and rounded to bfloat16 wherever they are used, so
that rounding them at the end changes nothing. Layers are stacked along a
leading axis and run in one scan.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

Params = dict[str, Any]
Rope = tuple[Float[Array, "B T F"], Float[Array, "B T F"]]
Attention = Literal["cudnn", "xla"]
Attend = Callable[[Array, Array, Array], tuple[Array, PyTree]]

_INIT_SCALE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
  """Sizes and constants; the usual ones give 15.6 M parameters.

  Attributes:
    vocab_size: Rows of the embedding, which is the output head too.
    hidden_size: Width of the residual stream.
    intermediate_size: Width of the gated MLP.
    num_layers: Decoder layers.
    num_heads: Query heads.
    num_kv_heads: Key / value heads.
    head_dim: Width of a head.
    rms_norm_eps: Added to the mean square in norms.
    rope_theta: Base of the rotary frequencies.
    max_positions: Longest context that is written into the config.
  """

  vocab_size: int = 4096
  hidden_size: int = 384
  intermediate_size: int = 768
  num_layers: int = 11
  num_heads: int = 6
  num_kv_heads: int = 2
  head_dim: int = 64
  rms_norm_eps: float = 1e-6
  rope_theta: float = 10000.0
  max_positions: int = 512


SIZES = {
  "reference": NetworkConfig(),
  "toy": NetworkConfig(
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    head_dim=16,
  ),
}
"""Sizes by name; `toy` is for trying the programs on a CPU."""


@functools.partial(jax.jit, static_argnames="config")
def init(key: Key[Array, ""], config: NetworkConfig) -> Params:
  """Random weights, `[in, out]`, float32."""
  count, width = config.num_layers, config.hidden_size
  heads = config.num_heads * config.head_dim
  joined = heads + 2 * config.num_kv_heads * config.head_dim
  inner = config.intermediate_size
  # What adds to the residual stream starts smaller the more layers add.
  added = _INIT_SCALE / (2 * count) ** 0.5
  matrices = {
    "qkv": ((count, width, joined), _INIT_SCALE),
    "output": ((count, heads, width), added),
    "gate_up": ((count, width, 2 * inner), _INIT_SCALE),
    "down": ((count, inner, width), added),
  }
  keys = jax.random.split(key, len(matrices) + 1)
  layers = {
    name: scale * jax.random.normal(k, shape)
    for k, (name, (shape, scale)) in zip(
      keys[1:], matrices.items(), strict=True
    )
  }
  layers["input_norm"] = jnp.ones((count, width))
  layers["mlp_norm"] = jnp.ones((count, width))
  layers["q_norm"] = jnp.ones((count, config.head_dim))
  layers["k_norm"] = jnp.ones((count, config.head_dim))
  return {
    "embedding": _INIT_SCALE
    * jax.random.normal(keys[0], (config.vocab_size, width)),
    "layers": layers,
    "norm": jnp.ones(width),
  }


@functools.partial(jax.jit, static_argnames=("config", "attention", "dtype"))
def loss_sum(
  params: Params,
  tokens: Int[Array, "B S"],
  counted: Bool[Array, "B T"],
  *,
  config: NetworkConfig,
  attention: Attention,
  dtype: DTypeLike = jnp.bfloat16,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
  """Sum of the cross entropies that count, in nats, and how many do.

  Args:
    params: Weights.
    tokens: One more than there are predictions, S = T + 1.
    counted: Whether each prediction counts.
    config: Sizes.
    attention: What computes attention; `cudnn` needs an NVIDIA GPU.
    dtype: Of activations and of weights where they are used.
  """
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  scores = logits(
    params, inputs, config=config, attention=attention, dtype=dtype
  )
  true = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
  losses = jax.nn.logsumexp(scores, axis=-1) - true
  return jnp.where(counted, losses, 0).sum(), counted.sum()


@functools.partial(jax.jit, static_argnames=("config", "attention", "dtype"))
def logits(
  params: Params,
  tokens: Int[Array, "B T"],
  *,
  config: NetworkConfig,
  attention: Attention,
  dtype: DTypeLike = jnp.bfloat16,
) -> Float[Array, "B T V"]:
  """Next-token logits at every position, float32.

  Args:
    params: Weights.
    tokens: Texts that start at position 0.
    config: Sizes.
    attention: What computes attention.
    dtype: Of activations and of weights where they are used.
  """
  hidden = embed(params, tokens, dtype)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  rope = rope_tables(positions, config)

  def attend(q, k, v):
    mixed = jax.nn.dot_product_attention(
      q, k, v, is_causal=True, implementation=attention
    )
    return mixed, None

  def body(hidden, weights):
    return run_layer(weights, hidden, rope, config, attend)

  hidden, _ = lax.scan(body, hidden, cast(params["layers"], dtype))
  return head(params, hidden, config)


def embed(
  params: Params, tokens: Int[Array, "B T"], dtype: DTypeLike
) -> Float[Array, "B T D"]:
  """Rows of the embedding."""
  # Rounded after the look-up: its gradient then adds up in float32.
  return params["embedding"][tokens].astype(dtype)


def head(
  params: Params, hidden: Float[Array, "*B D"], config: NetworkConfig
) -> Float[Array, "*B V"]:
  """Final norm and tied output head, float32."""
  scale = params["norm"].astype(hidden.dtype)
  normed = _rms_norm(hidden, scale, config.rms_norm_eps)
  return jnp.einsum(
    "...d,vd->...v",
    normed,
    params["embedding"].astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def run_layer(
  weights: Params,
  hidden: Float[Array, "B T D"],
  rope: Rope,
  config: NetworkConfig,
  attend: Attend,
) -> tuple[Float[Array, "B T D"], PyTree]:
  """One layer.

  Args:
    weights: Of this layer, in the dtype to compute in.
    hidden: The residual stream.
    rope: Cosines and sines of the tokens' positions.
    config: Sizes.
    attend: From queries, keys and values `[B, T, heads, head_dim]` to the
      mixed values and anything to hand on.

  Returns:
    The new residual stream and what `attend` handed on.
  """
  batch, tokens, _ = hidden.shape
  eps = config.rms_norm_eps
  joined = _rms_norm(hidden, weights["input_norm"], eps) @ weights["qkv"]
  joined = joined.reshape(batch, tokens, -1, config.head_dim)
  ends = config.num_heads, config.num_heads + config.num_kv_heads
  q, k, v = jnp.split(joined, ends, axis=2)
  q = _rotate(_rms_norm(q, weights["q_norm"], eps), rope)
  k = _rotate(_rms_norm(k, weights["k_norm"], eps), rope)
  mixed, kept = attend(q, k, v)
  hidden = hidden + mixed.reshape(batch, tokens, -1) @ weights["output"]
  joined = _rms_norm(hidden, weights["mlp_norm"], eps) @ weights["gate_up"]
  gate, up = jnp.split(joined, 2, axis=-1)
  return hidden + (jax.nn.silu(gate) * up) @ weights["down"], kept


def rope_tables(positions: Int[Array, "B T"], config: NetworkConfig) -> Rope:
  """Cosines and sines of every position and frequency."""
  exponent = jnp.arange(0, config.head_dim, 2) / config.head_dim
  angles = positions[..., None] * config.rope_theta**-exponent
  return jnp.cos(angles), jnp.sin(angles)


def cast(weights: PyTree, dtype: DTypeLike) -> PyTree:
  """The same tree in another dtype."""
  return jax.tree.map(lambda x: x.astype(dtype), weights)


def count_parameters(params: Params) -> int:
  """Numbers that are learned."""
  return sum(x.size for x in jax.tree.leaves(params))


def _rms_norm(x, scale, eps):
  wide = x.astype(jnp.float32)
  wide *= lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
  return wide.astype(x.dtype) * scale


def _rotate(x, rope):
  """Rotates the pairs (i, i + head_dim / 2)."""
  cos, sin = (table[:, :, None] for table in rope)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
