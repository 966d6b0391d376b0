"""One decoder-only transformer, made from a config.

Layers are stacked along a leading axis and run in a `lax.scan` whose carry
holds the hidden states, the packed KV cache and the policy's state; each layer
reads its level from that state, runs, and updates it from what it did to the
hidden states (paper section 3.1).
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax import bfloat16
from autoematic_jax import kv_cache
from autoematic_jax import policy as policy_lib
from autoematic_jax import signals
from autoematic_jax.models import attention
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import RopeScaling
from autoematic_jax.models.layers import DenseLinear
from autoematic_jax.models.layers import Precision
from autoematic_jax.models.layers import QuantizedLinear
from autoematic_jax.models.layers import RMSNorm
from autoematic_jax.models.layers import output_head
from autoematic_jax.pallas_kernels import attention as packed_attention
from autoematic_jax.pallas_kernels.extended_gemm import Gate
from autoematic_jax.pallas_kernels.extended_gemm import rms_norm

Linear = QuantizedLinear | DenseLinear
Phase = Literal["prefill", "decode"]

ADAPTIVE = -1
"""Marks a layer whose level the policy chooses."""


class DecoderLayer(nnx.Module):
  """Attention and gated MLP, each behind a norm and a residual.

  Holds the arrays of all layers, stacked; `precision.layer` says which runs.
  """

  def __init__(
    self,
    *,
    input_norm: RMSNorm,
    qkv: Linear,
    output: Linear,
    mlp_norm: RMSNorm,
    gate_up: Linear,
    down: Linear,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
  ):
    self.input_norm = input_norm
    self.qkv = qkv
    self.output = output
    self.mlp_norm = mlp_norm
    self.gate_up = gate_up
    self.down = down
    self.q_norm = q_norm
    self.k_norm = k_norm

  def __call__(
    self,
    hidden: Float[Array, "B T D"],
    context: "Context",
    cache: kv_cache.Cache,
    precision: Precision,
  ) -> tuple[Float[Array, "B T D"], kv_cache.Cache]:
    """Runs one layer; returns the new hidden states and the cache."""
    attended, cache = self.attend(hidden, context, cache, precision)
    hidden = hidden + attended
    return hidden + self.mlp(hidden, precision), cache

  def attend(
    self,
    hidden: Float[Array, "B T D"],
    context: "Context",
    cache: kv_cache.Cache,
    precision: Precision,
  ) -> tuple[Float[Array, "B T D"], kv_cache.Cache]:
    """Attention block: stores the new keys and values, then attends."""
    mixed, cache = self.mix(hidden, context, cache, precision)
    return self.output(mixed, precision), cache

  def mix(
    self,
    hidden: Float[Array, "B T D"],
    context: "Context",
    cache: kv_cache.Cache,
    precision: Precision,
  ) -> tuple[Float[Array, "B T H"], kv_cache.Cache]:
    """What the attention block's output projection reads."""
    config, layer = context.config, precision.layer
    batch, tokens, _ = hidden.shape
    joined = self.qkv(hidden, precision, self.input_norm.before())
    joined = joined.reshape(batch, tokens, -1, config.head_dim)
    rotated, values = jnp.split(
      joined, [config.num_heads + config.num_kv_heads], axis=2
    )
    rotated = attention.apply_rope(
      self._normed(rotated, config.num_heads, layer), context.rope
    )
    queries, keys = jnp.split(rotated, [config.num_heads], axis=2)
    cache = cache.write(
      layer,
      context.positions[:, 0],
      keys.swapaxes(1, 2),
      values.swapaxes(1, 2),
      precision.kv_levels,
    )
    if (
      tokens == 1
      and isinstance(cache, kv_cache.KVCache)
      and self._attends_packed(cache, config)
    ):
      mixed = packed_attention.attend(
        queries[:, 0],
        cache.planes["codes"],
        cache.planes["scales"],
        context.positions[:, 0],
        layer,
      )
    else:
      all_keys, all_values = cache.read(layer)
      mixed = attention.attend(queries, all_keys, all_values, context.positions)
    return mixed.reshape(batch, tokens, -1), cache

  def _attends_packed(self, cache, config):
    """Whether a kernel attends over the cache as it is packed."""
    if not (
      isinstance(self.output, QuantizedLinear) and self.output.runs_on_hopper
    ):
      return False
    width = cache.planes["codes"].shape[-1]
    group = config.num_heads // config.num_kv_heads
    return packed_attention.takes(width, group)

  def _normed(self, heads, queries, layer):
    """Norms of queries and keys, side by side `[B, T, heads, D]`."""
    if self.q_norm is None or self.k_norm is None:
      return heads
    norms = [(self.q_norm, queries), (self.k_norm, heads.shape[2] - queries)]
    scale = jnp.concatenate(
      [
        jnp.broadcast_to(norm.of_layer(layer), (count, heads.shape[3]))
        for norm, count in norms
      ]
    )
    return rms_norm(heads, scale, self.q_norm.epsilon)

  def mlp(
    self, hidden: Float[Array, "B T D"], precision: Precision
  ) -> Float[Array, "B T D"]:
    """SwiGLU block."""
    joined = self.gate_up(hidden, precision, self.mlp_norm.before())
    return self.down(joined, precision, Gate())

  def gated(
    self, hidden: Float[Array, "B T D"], precision: Precision
  ) -> Float[Array, "B T F"]:
    """What the SwiGLU block's down projection reads."""
    joined = self.gate_up(hidden, precision, self.mlp_norm.before())
    return Gate()(joined, precision.layer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What every layer of one pass shares.

  Attributes:
    positions: `[B, T]` position of each new token; consecutive in a row.
    token_mask: `[B, T]` False for padding.
    rope: Cosines and sines `[B, T, head_dim / 2]`.
    config: The model's config.
  """

  positions: Int[Array, "B T"]
  token_mask: Bool[Array, "B T"]
  rope: tuple[Float[Array, "B T F"], Float[Array, "B T F"]]
  config: ModelConfig = dataclasses.field(metadata={"static": True})


class LayerTrace(NamedTuple):
  """What the layers of a pass did.

  Attributes:
    bits: `[L, B]` at which each ran.
    activity: `[L, B]` how much each changed the hidden states
      (`signals.layer_update_activity`).
  """

  bits: Int[Array, "L B"]
  activity: Float[Array, "L B"]


class Decoder(nnx.Module):
  """Embedding, stacked layers, final norm and output head.

  Attributes:
    embedding: `[V, D]`.
    layers: One DecoderLayer whose arrays carry a leading layer axis.
    norm: Final norm.
    head: `[V, D]` output head, or None when tied to the embedding.
    config: The model's config.
    choices: Levels that its weights hold; empty for a dense model.
  """

  def __init__(
    self,
    *,
    embedding: bfloat16.Stored,
    layers: DecoderLayer,
    norm: RMSNorm,
    head: bfloat16.Stored | None,
    config: ModelConfig,
    choices: tuple[int, ...],
  ):
    self.embedding = nnx.Param(embedding)
    self.layers = layers
    self.norm = norm
    self.head = nnx.Param(head) if head is not None else None
    self.config = config
    self.choices = choices

  def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the embedding, float32."""
    return bfloat16.to_float32(self.embedding.get_value()[tokens])

  def logits(
    self, hidden: Float[Array, "B D"], *, one_by_one: bool = True
  ) -> Float[Array, "B V"]:
    """Next-token logits from the last hidden states, float32.

    `one_by_one` keeps a row's bits apart from how many rows there are; off, it
    is faster for many rows.
    """
    head = self.embedding if self.head is None else self.head
    return output_head(
      self.norm(hidden), head.get_value(), one_by_one=one_by_one
    )

  def context(
    self,
    start: Int[Array, "B"],
    lengths: Int[Array, "B"],
    count: int,
  ) -> Context:
    """What the layers share in a pass over `count` tokens of each request.

    Args:
      start: Position of each request's first new token.
      lengths: New tokens of each request; the rest is padding.
      count: New tokens with their padding.

    Returns:
      Positions, mask and rotary tables.
    """
    positions = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return Context(
      positions=positions,
      token_mask=jnp.arange(count)[None] < lengths[:, None],
      rope=attention.rope_tables(positions, rope_frequencies(self.config)),
      config=self.config,
    )

  def run_layers(
    self,
    tokens: Int[Array, "B T"],
    *,
    start: Int[Array, "B"],
    lengths: Int[Array, "B"],
    cache: kv_cache.Cache,
    policy: policy_lib.PolicyState,
    forced: Int[Array, "L"] | Int[Array, "L B"],
    policy_config: policy_lib.PolicyConfig,
    phase: Phase,
  ) -> tuple[
    Float[Array, "B T D"],
    kv_cache.Cache,
    policy_lib.PolicyState,
    LayerTrace,
  ]:
    """Runs new tokens through every layer.

    Args:
      tokens: New tokens, padded at the end.
      start: Position of each request's first new token.
      lengths: New tokens of each request; the rest is padding.
      cache: Cache that holds positions below `start`.
      policy: State at the beginning of this pass.
      forced: Bits of each layer, for all requests or for each, or ADAPTIVE
        to follow the policy.
      policy_config: The policy's constants.
      phase: Which of the policy's rules apply.

    Returns:
      Hidden states before the final norm, the cache, the policy's state and
      what each layer did.
    """
    context = self.context(start, lengths, tokens.shape[1])

    def body(carry, inputs):
      hidden, cache, packed = carry
      policy = policy_lib.unpack(packed)
      layer, forced_bits = inputs
      adaptive = forced_bits == ADAPTIVE
      bits = policy_lib.level_bits(policy_config, policy, layer)
      bits = jnp.where(adaptive, bits, forced_bits)
      kept = jnp.maximum(bits, policy_config.kv_min_level)
      kv_bits = jnp.where(adaptive, kept, bits)
      precision = Precision.of(layer, bits, self.choices, kv_bits)
      hidden_out, cache = self.layers(hidden, context, cache, precision)
      activity = signals.layer_update_activity(
        hidden,
        hidden_out,
        context.token_mask,
        reduction=policy_config.reduction,
        epsilon=policy_config.epsilon,
      )
      update = (
        policy_lib.update_prefill
        if phase == "prefill"
        else policy_lib.update_decode
      )
      policy = update(policy_config, policy, activity, layer)
      packed = policy_lib.pack(policy)
      return (hidden_out, cache, packed), LayerTrace(bits, activity)

    layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
    (hidden, cache, packed), trace = lax.scan(
      body,
      (self.embed(tokens), cache, policy_lib.pack(policy)),
      (layers, forced),
    )
    return hidden, cache, policy_lib.unpack(packed), trace


def rope_frequencies(config: ModelConfig) -> Float[np.ndarray, "F"]:
  """Rotary frequencies, scaled as the config says, `[head_dim / 2]`."""
  exponent = np.arange(0, config.head_dim, 2, dtype=np.float64)
  frequencies = config.rope_theta ** -(exponent / config.head_dim)
  scaling = config.rope_scaling
  if scaling is not None and scaling.kind == "linear":
    frequencies = frequencies / scaling.factor
  if scaling is not None and scaling.kind == "llama3":
    frequencies = _llama3_frequencies(frequencies, scaling)
  return frequencies.astype(np.float32)


def _llama3_frequencies(frequencies, scaling: RopeScaling):
  """Keeps short wavelengths, divides long ones, blends between."""
  wavelength = 2 * np.pi / frequencies
  positions = scaling.original_max_positions
  blend = (positions / wavelength - scaling.low_freq_factor) / (
    scaling.high_freq_factor - scaling.low_freq_factor
  )
  blend = np.clip(blend, 0.0, 1.0)
  return (1 - blend) * frequencies / scaling.factor + blend * frequencies
