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
from autoematic_jax.kv_codecs import AutoFPCodec
from autoematic_jax.models import attention
from autoematic_jax.models.config import MlpActivation
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import RopeScaling
from autoematic_jax.models.layers import DenseLinear
from autoematic_jax.models.layers import Precision
from autoematic_jax.models.layers import QuantizedLinear
from autoematic_jax.models.layers import RMSNorm
from autoematic_jax.models.layers import output_head
from autoematic_jax.models.router import Router
from autoematic_jax.pallas_kernels import attention as packed_attention
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm import Gate
from autoematic_jax.pallas_kernels.extended_gemm import at_layer
from autoematic_jax.pallas_kernels.extended_gemm import rms_norm

Linear = QuantizedLinear | DenseLinear
Rope = tuple[Float[Array, "B T F"], Float[Array, "B T F"]]
Phase = Literal["prefill", "decode"]

_UNROLLED = 4
"""Layers of a decode step that a GPU runs without a loop's copies between."""

ADAPTIVE = -1
"""Marks a layer whose level the policy chooses."""

NO_WINDOW = 1 << 30
"""Window of a layer that sees every key, where other layers have one."""


class DecoderLayer(nnx.Module):
  """Attention and gated MLP, each behind a norm and a residual.

  Holds the arrays of all layers, stacked; `precision.layer` says which runs.
  With a router the MLP's projections hold the experts of layer 0, then those
  of layer 1 and so on.
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
    post_attention_norm: RMSNorm | None = None,
    post_mlp_norm: RMSNorm | None = None,
    router: Router | None = None,
    window: Int[Array, "*L"] | None = None,
    activation: MlpActivation = "silu",
  ):
    self.input_norm = input_norm
    self.qkv = qkv
    self.output = output
    self.mlp_norm = mlp_norm
    self.gate_up = gate_up
    self.down = down
    self.q_norm = q_norm
    self.k_norm = k_norm
    self.post_attention_norm = post_attention_norm
    self.post_mlp_norm = post_mlp_norm
    self.router = router
    self.window = nnx.Param(window) if window is not None else None
    self.activation: MlpActivation = activation

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
    return self.project_mixed(mixed, precision), cache

  def project_mixed(
    self, mixed: Float[Array, "B T H"], precision: Precision
  ) -> Float[Array, "B T D"]:
    """What the attention block adds to the hidden states."""
    out = self.output(mixed, precision)
    norm = self.post_attention_norm
    return out if norm is None else norm(out, precision.layer)

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
    if tokens == 1 and self._attends_packed(cache, config):
      return self._mix_packed(joined, context, cache, precision)
    joined = joined.reshape(batch, tokens, -1, config.head_dim)
    rotated, values = jnp.split(
      joined, [config.num_heads + config.num_kv_heads], axis=2
    )
    window = None
    if self.window is not None:
      window = at_layer(self.window.get_value(), layer)
    rotated = attention.apply_rope(
      self._normed(rotated, config.num_heads, layer), context.rope_of(window)
    )
    queries, keys = jnp.split(rotated, [config.num_heads], axis=2)
    cache = cache.write(
      layer,
      context.positions[:, 0],
      keys.swapaxes(1, 2),
      values.swapaxes(1, 2),
      precision.kv_levels,
    )
    all_keys, all_values = cache.read(layer)
    mixed = attention.attend(
      queries,
      all_keys,
      all_values,
      context.positions,
      window=window,
      scale=config.query_scale,
      softcap=config.attention_softcap,
    )
    return mixed.reshape(batch, tokens, -1), cache

  def _attends_packed(self, cache, config):
    """Whether kernels store to and attend over the cache as it is packed."""
    if not (
      isinstance(self.output, QuantizedLinear)
      and self.output.runs_on_hopper
      and isinstance(cache, kv_cache.KVCache)
      and isinstance(cache.codec, AutoFPCodec)
    ):
      return False
    plain = (self.window, config.query_scale, config.attention_softcap)
    if plain != (None, None, None):
      return False
    width = cache.planes["codes"].shape[-1]
    group = config.num_heads // config.num_kv_heads
    return packed_attention.takes(config.head_dim, width, group)

  def _mix_packed(self, joined, context, cache, precision):
    """The same for one token, by kernels."""
    norms = None
    if self.q_norm is not None and self.k_norm is not None:
      norms = packed_attention.HeadNorms(
        query=self.q_norm.before().scale,
        key=self.k_norm.before().scale,
        epsilon=self.q_norm.epsilon,
      )
    cos, sin = context.rope
    mixed, codes, scales = packed_attention.step(
      joined[:, 0],
      (cos[:, 0], sin[:, 0]),
      norms,
      cache.planes["codes"],
      cache.planes["scales"],
      context.positions[:, 0],
      precision.kv_levels,
      precision.layer,
      config=ActivationConfig(
        decoding=cache.codec.decoding, nearest_base=cache.codec.nearest_base
      ),
    )
    planes = {"codes": codes, "scales": scales}
    return mixed[:, None], dataclasses.replace(cache, planes=planes)

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
    """What the gated MLP, or those of the chosen experts, adds."""
    if self.router is not None:
      return self._experts(self.router, hidden, precision)
    joined = self.gate_up(hidden, precision, self.mlp_norm.before())
    return self._project_joined(joined, precision)

  def _project_joined(self, joined, precision):
    if self.activation == "silu":
      # The Hopper kernels make one of this gate and the quantization.
      return self.project_gated(joined, precision, Gate())
    return self.project_gated(self._gate(joined), precision)

  def project_gated(
    self,
    x: Float[Array, "B T F"],
    precision: Precision,
    before: Gate | None = None,
  ) -> Float[Array, "B T D"]:
    """What the MLP block adds to the hidden states."""
    out = self.down(x, precision, before)
    norm = self.post_mlp_norm
    return out if norm is None else norm(out, precision.layer)

  def gated(
    self, hidden: Float[Array, "B T D"], precision: Precision
  ) -> Float[Array, "B T F"]:
    """What the MLP's down projection reads."""
    return self._gate(self.gate_up(hidden, precision, self.mlp_norm.before()))

  def _gate(self, joined):
    gate, up = jnp.split(joined, 2, axis=-1)
    if self.activation == "silu":
      return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=True) * up

  def _experts(self, router, hidden, precision):
    """Every expert over all tokens, if any chose it, weighted by its share.

    Experts are added in order, so that a token's bits do not depend on what
    other tokens chose.
    """
    x = self.mlp_norm(hidden, precision.layer)
    shares = router(x, precision.layer)
    count = router.config.count

    def expert(total, number):
      share = lax.dynamic_slice_in_dim(shares, number, 1, axis=-1)

      def run(total):
        own = dataclasses.replace(
          precision, layer=precision.layer * count + number
        )
        out = self._project_joined(self.gate_up(x, own), own)
        return total + jnp.where(share > 0, share * out, 0.0)

      return lax.cond(jnp.any(share > 0), run, lambda t: t, total), None

    numbers = jnp.arange(count, dtype=jnp.int32)
    return lax.scan(expert, jnp.zeros_like(hidden), numbers)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What every layer of one pass shares.

  Attributes:
    positions: `[B, T]` position of each new token; consecutive in a row.
    token_mask: `[B, T]` False for padding.
    rope: Cosines and sines `[B, T, head_dim / 2]`.
    local_rope: Those of layers with a window, where they differ.
    config: The model's config.
  """

  positions: Int[Array, "B T"]
  token_mask: Bool[Array, "B T"]
  rope: Rope
  local_rope: Rope | None
  config: ModelConfig = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(
    cls,
    config: ModelConfig,
    positions: Int[Array, "B T"],
    token_mask: Bool[Array, "B T"],
  ) -> "Context":
    """The context of a pass over tokens at these positions."""
    local = None
    if config.local_rope_theta is not None:
      base = dataclasses.replace(
        config, rope_theta=config.local_rope_theta, rope_scaling=None
      )
      local = attention.rope_tables(positions, rope_frequencies(base))
    return cls(
      positions=positions,
      token_mask=token_mask,
      rope=attention.rope_tables(positions, rope_frequencies(config)),
      local_rope=local,
      config=config,
    )

  def rope_of(self, window: Int[Array, ""] | None) -> Rope:
    """The rope of a layer, by its window."""
    if self.local_rope is None or window is None:
      return self.rope
    return jax.tree.map(
      lambda local, full: jnp.where(window < NO_WINDOW, local, full),
      self.local_rope,
      self.rope,
    )


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

  @property
  def runs_on_hopper(self) -> bool:
    """Whether the Hopper kernels multiply by its weights."""
    output = self.layers.output
    return isinstance(output, QuantizedLinear) and output.runs_on_hopper

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
    (hidden, cache, packed), trace = lax.scan(
      body,
      (self.embed(tokens), cache, policy_lib.pack(policy)),
      (layers, forced),
      unroll=_UNROLLED if phase == "decode" and self.runs_on_hopper else 1,
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
