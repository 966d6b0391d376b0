"""Builds a decoder from tensors looked up by their Hugging Face names."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from autoematic_jax import bfloat16
from autoematic_jax import formats
from autoematic_jax.errors import CheckpointError
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.layers import DenseLinear
from autoematic_jax.models.layers import QuantizedLinear
from autoematic_jax.models.layers import RMSNorm
from autoematic_jax.models.transformer import Decoder
from autoematic_jax.models.transformer import DecoderLayer
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
  """
  builder = _LayerBuilder(
    config, dtype, activation or ActivationConfig(), implementation
  )
  stacked = _stack(
    (builder.layer(tensors) for tensors in layers), config.num_layers
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
    norm=_norm(rest, "model.norm", config),
    head=head,
    config=config,
    choices=_choices(stacked),
  )


def build_layer(config: ModelConfig, tensors: Tensors) -> DecoderLayer:
  """One layer alone, as a stack of one.

  Args:
    config: The model's config.
    tensors: Its tensors by name relative to the layer.

  Returns:
    The layer; projections that are not quantized run in float32.
  """
  builder = _LayerBuilder(config, jnp.float32, ActivationConfig(), "xla")
  return _stack(iter([builder.layer(tensors)]), 1)


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


def _norm(tensors, name, config):
  scale = jnp.asarray(tensors[f"{name}.weight"], jnp.float32)
  return RMSNorm(scale, config.rms_norm_eps)


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

  def layer(self, tensors: Tensors) -> DecoderLayer:
    """One decoder layer from its tensors."""
    attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    norm = partial(_norm, tensors, config=self.config)
    qk_norm = self.config.qk_norm
    return DecoderLayer(
      input_norm=norm("input_layernorm"),
      qkv=self._linear("qkv", tensors, attention),
      output=self._linear("output", tensors, ["self_attn.o_proj"]),
      mlp_norm=norm("post_attention_layernorm"),
      gate_up=self._linear(
        "gate_up", tensors, ["mlp.gate_proj", "mlp.up_proj"]
      ),
      down=self._linear("down", tensors, ["mlp.down_proj"]),
      q_norm=norm("self_attn.q_norm") if qk_norm else None,
      k_norm=norm("self_attn.k_norm") if qk_norm else None,
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
