"""One layer of the decoder: attention and a gated MLP, or experts."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import kv_cache
from autoematic_jax.kv_codecs import AutoFPCodec
from autoematic_jax.models import attention
from autoematic_jax.models.config import MlpActivation
from autoematic_jax.models.context import Context
from autoematic_jax.models.layers import DenseLinear
from autoematic_jax.models.layers import Precision
from autoematic_jax.models.layers import QuantizedLinear
from autoematic_jax.models.layers import RMSNorm
from autoematic_jax.models.router import Router
from autoematic_jax.pallas_kernels import attention as packed_attention
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm import Gate
from autoematic_jax.pallas_kernels.extended_gemm import at_layer
from autoematic_jax.pallas_kernels.extended_gemm import rms_norm

Linear = QuantizedLinear | DenseLinear


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

  @property
  def runs_on_hopper(self) -> bool:
    """Whether the Hopper kernels multiply by its weights."""
    output = self.output
    return isinstance(output, QuantizedLinear) and output.runs_on_hopper

  def __call__(
    self,
    hidden: Float[Array, "B T D"],
    context: Context,
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
    context: Context,
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
    context: Context,
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
      self.runs_on_hopper
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
    return self.project_gated(_gelu_gate(joined), precision)

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
    joined = self.gate_up(hidden, precision, self.mlp_norm.before())
    if self.activation == "silu":
      return Gate()(joined, precision.layer)
    return _gelu_gate(joined)

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


def _gelu_gate(joined):
  gate, up = jnp.split(joined, 2, axis=-1)
  return jax.nn.gelu(gate, approximate=True) * up
