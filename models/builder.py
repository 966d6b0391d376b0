"""Builds a decoder from tensors looked up by their Hugging Face names."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from autoematic_jax import bfloat16
from autoematic_jax import formats
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.context import NO_WINDOW
from autoematic_jax.models.decoder_layer import DecoderLayer
from autoematic_jax.models.layers import DenseLinear
from autoematic_jax.models.layers import QuantizedLinear
from autoematic_jax.models.layers import RMSNorm
from autoematic_jax.models.router import Router
from autoematic_jax.models.transformer import Decoder
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm import RAGGED_FIELDS
from autoematic_jax.pallas_kernels.extended_gemm import expand
from autoematic_jax.pallas_kernels.extended_gemm import prepack

Implementation = Literal["xla", "mosaic_sm90"]
"""What multiplies by quantized weights, of those that models run on."""

Tensor = formats.QTensor | Array | np.ndarray
Tensors = dict[str, Tensor]


def build_decoder(
  config: ModelConfig,
  *,
  layers: Iterable[Tensors],
  rest: Tensors,
  dtype: jnp.dtype = jnp.float32,
  activation: ActivationConfig | None = None,
  implementation: Implementation = "xla",
  decode_rows: int = 16,
) -> Decoder:
  """Assembles a decoder, one layer in memory at a time.

  Args:
    config: The model's config.
    layers: For each layer in order, its tensors by name relative to the
      layer, such as `self_attn.q_proj.weight`.
    rest: Embedding, final norm and output head by full name.
    dtype: Of projections that are not quantized.
    activation: How activations are refined; its step is replaced by that of
      the weights. None is the default.
    implementation: What multiplies by quantized weights.
    decode_rows: Requests in the largest decode batch, for `mosaic_sm90`, at
      most 64; up to 16 run a few percent faster where it is 16.

  Returns:
    The decoder; its projections are quantized where the tensors are.

  Raises:
    CheckpointError: The number of layers is not that of the config.
    PrecisionError: The implementation does not run such a model.
  """
  if config.experts is not None and implementation == "mosaic_sm90":
    raise PrecisionError(
      f"'mosaic_sm90' runs no experts, and this {config.family} model has"
      f" {config.experts.count} in each layer; use 'xla'"
    )
  builder = _LayerBuilder(
    config, dtype, activation or ActivationConfig(), implementation
  )
  stacked = _stack_layers(
    (builder.layer(t, number) for number, t in enumerate(layers)),
    config.num_layers,
  )
  for name, weights in builder.waiting.items():
    packed = prepack(weights, max_rows=decode_rows)
    getattr(stacked, name).weight = nnx.Param(packed)
  head = None
  if not config.tie_word_embeddings:
    head = bfloat16.store(_dense(rest, "lm_head.weight"))
  return Decoder(
    embedding=bfloat16.store(_dense(rest, "model.embed_tokens.weight")),
    layers=stacked,
    norm=build_norm(_dense(rest, "model.norm.weight"), config),
    head=head,
    config=config,
    choices=_choices(stacked),
  )


def build_layer(
  config: ModelConfig, tensors: Tensors, number: int
) -> DecoderLayer:
  """One layer alone, as a stack of one.

  Args:
    config: The model's config.
    tensors: Its tensors by name relative to the layer.
    number: Which layer of the model it is.

  Returns:
    The layer; projections that are not quantized run in float32.
  """
  builder = _LayerBuilder(config, jnp.float32, ActivationConfig(), "xla")
  return _stack_layers(iter([builder.layer(tensors, number)]), 1)


def build_norm(values: Array | np.ndarray, config: ModelConfig) -> RMSNorm:
  """A norm from its stored scale."""
  scale = jnp.asarray(values, jnp.float32)
  # Here and not at conversion, where the sum would be rounded to bfloat16.
  scale = scale + 1.0 if config.norms_less_one else scale
  return RMSNorm(scale, config.rms_norm_eps)


def _dense(tensors: Tensors, name: str) -> Array | np.ndarray:
  tensor = tensors[name]
  if isinstance(tensor, formats.QTensor):
    raise CheckpointError(f"{name} is quantized; it must be dense")
  return tensor


def _choices(layers):
  weight = layers.qkv
  if isinstance(weight, DenseLinear):
    return ()
  return weight.weight.get_value().levels


class _LayerBuilder:
  """Joins the tensors of a layer that read the same input.

  Attributes:
    waiting: Of each projection, the tensors of every layer, where all layers
      must be known to pack one.
  """

  def __init__(self, config, dtype, activation, implementation):
    self.config = config
    self.dtype = np.dtype(dtype)
    self.activation = activation
    self.implementation = implementation
    self.waiting: dict[str, list[list[formats.QTensor]]] = {}

  def layer(self, tensors: Tensors, number: int) -> DecoderLayer:
    """One decoder layer from its tensors."""
    config = self.config
    attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]

    def norm(name):
      return build_norm(_dense(tensors, f"{name}.weight"), config)

    before_mlp = "post_attention_layernorm"
    extra: dict[str, Any] = {}
    if config.post_norms:
      before_mlp = "pre_feedforward_layernorm"
      extra["post_attention_norm"] = norm("post_attention_layernorm")
      extra["post_mlp_norm"] = norm("post_feedforward_layernorm")
    if config.qk_norm:
      extra["q_norm"] = norm("self_attn.q_norm")
      extra["k_norm"] = norm("self_attn.k_norm")
    router = None
    if config.experts is not None:
      kernel = bfloat16.store(_dense(tensors, "mlp.gate.weight"))
      router = Router(kernel, config.experts)
    return DecoderLayer(
      input_norm=norm("input_layernorm"),
      qkv=self._linear("qkv", tensors, attention),
      output=self._linear("output", tensors, ["self_attn.o_proj"]),
      mlp_norm=norm(before_mlp),
      gate_up=self._mlp("gate_up", tensors, ["gate_proj", "up_proj"]),
      down=self._mlp("down", tensors, ["down_proj"]),
      router=router,
      window=_window(config, number),
      activation=config.mlp_activation,
      **extra,
    )

  def _mlp(self, projection, tensors, names):
    """A projection of the MLP, or of its experts in a stack."""
    if self.config.experts is None:
      return self._linear(projection, tensors, [f"mlp.{n}" for n in names])
    count = self.config.experts.count
    return _stack(
      (
        self._linear(
          projection, tensors, [f"mlp.experts.{expert}.{n}" for n in names]
        )
        for expert in range(count)
      ),
      count,
    )

  def _linear(self, projection, tensors, names):
    weights = [tensors[f"{name}.weight"] for name in names]
    bias = None
    if f"{names[0]}.bias" in tensors:
      biases = [tensors[f"{name}.bias"] for name in names]
      bias = jnp.concatenate([jnp.asarray(b, jnp.float32) for b in biases])
    if isinstance(weights[0], formats.QTensor):
      activation = dataclasses.replace(
        self.activation, decoding=weights[0].decoding
      )
      if self.implementation == "mosaic_sm90":
        self.waiting.setdefault(projection, []).append(weights)
        return QuantizedLinear(cast(Any, None), bias, activation)
      return QuantizedLinear(expand(weights), bias, activation)
    kernel = np.concatenate([np.asarray(weight) for weight in weights])
    return DenseLinear(bfloat16.store(kernel, self.dtype), bias)


def _window(config, number):
  if config.sliding_window is None:
    return None
  full = number in config.full_layers
  return jnp.int32(NO_WINDOW if full else config.sliding_window)


def _stack_layers(layers, count):
  """Stacks decoder layers, and their experts one layer after the other."""
  stacked = _stack(layers, count)
  if stacked.router is not None:
    for name in ("gate_up", "down"):
      experts = jax.tree.map(
        lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]),
        getattr(stacked, name),
      )
      setattr(stacked, name, experts)
  return stacked


def _stack(layers, count):
  """Stacks modules of one structure along a new leading axis."""
  buffers, treedef, filled = None, None, 0
  for module in layers:
    leaves, structure = jax.tree.flatten_with_path(module)
    if buffers is None:
      treedef = structure
      buffers = [np.zeros((count, *x.shape), x.dtype) for _, x in leaves]
    if structure != treedef or filled == count:
      raise CheckpointError(
        f"layer {filled} has other tensors than layer 0, or there are more"
        f" than {count} layers"
      )
    for index, (path, leaf) in enumerate(leaves):
      if _is_ragged(path):
        buffers[index] = _widened(buffers[index], leaf.shape[-1])
        buffers[index][filled, ..., : leaf.shape[-1]] = np.asarray(leaf)
      else:
        buffers[index][filled] = np.asarray(leaf)
    filled += 1
  if buffers is None or treedef is None or filled != count:
    raise CheckpointError(f"{filled} layers were given; config has {count}")
  arrays = [jnp.asarray(buffer) for buffer in buffers]
  return jax.tree.unflatten(treedef, arrays)


def _is_ragged(path):
  """Whether an array may be narrower in some layers than in others."""
  return getattr(path[-1], "name", None) in RAGGED_FIELDS


def _widened(buffer, width):
  """A buffer at least so wide; what is added is 0."""
  missing = max(0, width - buffer.shape[-1])
  if not missing:
    return buffer
  return np.pad(buffer, [(0, 0)] * (buffer.ndim - 1) + [(0, missing)])
