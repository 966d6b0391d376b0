"""One decoder-only transformer, made from a config.

Layers are stacked along a leading axis and run in a `lax.scan` whose carry
holds the hidden states, the packed KV cache and the policy's state; each layer
reads its level from that state, runs, and updates it from what it did to the
hidden states (paper section 3.1).
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import bfloat16
from autoematic_jax import kv_cache
from autoematic_jax import policy as policy_lib
from autoematic_jax import signals
from autoematic_jax.models import attention
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.context import Context
from autoematic_jax.models.decoder_layer import DecoderLayer
from autoematic_jax.models.layers import Precision
from autoematic_jax.models.layers import RMSNorm
from autoematic_jax.models.layers import output_head

Phase = Literal["prefill", "decode"]

_UNROLLED = 4
"""Layers of a decode step that a GPU runs without a loop's copies between."""

ADAPTIVE = -1
"""Marks a layer whose level the policy chooses."""


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
    """Rows of the embedding, scaled, float32."""
    rows = bfloat16.to_float32(self.embedding.get_value()[tokens])
    return rows * self.config.embedding_scale

  def logits(
    self, hidden: Float[Array, "B D"], *, one_by_one: bool = True
  ) -> Float[Array, "B V"]:
    """Next-token logits from the last hidden states, float32.

    `one_by_one` keeps a row's bits apart from how many rows there are; off, it
    is faster for many rows.
    """
    head = self.embedding if self.head is None else self.head
    logits = output_head(
      self.norm(hidden), head.get_value(), one_by_one=one_by_one
    )
    cap = self.config.logit_softcap
    return logits if cap is None else attention.soft_capped(logits, cap)

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
    token_mask = jnp.arange(count)[None] < lengths[:, None]
    return Context.of(self.config, positions, token_mask)

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
    unrolls = phase == "decode" and self.layers.runs_on_hopper
    (hidden, cache, packed), trace = lax.scan(
      body,
      (self.embed(tokens), cache, policy_lib.pack(policy)),
      (layers, forced),
      unroll=_UNROLLED if unrolls else 1,
    )
    return hidden, cache, policy_lib.unpack(packed), trace
