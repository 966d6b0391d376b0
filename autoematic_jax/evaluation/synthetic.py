"""Models of real shapes with random weights, made on the device.

What they say is noise; what they cost is not.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from autoematic_jax import formats
from autoematic_jax.models.builder import Implementation
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.decoder_layer import DecoderLayer
from autoematic_jax.models.layers import DenseLinear
from autoematic_jax.models.layers import QuantizedLinear
from autoematic_jax.models.layers import RMSNorm
from autoematic_jax.models.transformer import Decoder
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm import ExpandedWeight
from autoematic_jax.pallas_kernels.extended_gemm import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm import expand
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90
from autoematic_jax.pallas_kernels.extended_gemm import prepack

Format = Literal["bf16", "nvfp4", "autofp6"]

MODELS = {
  "qwen3-8b": ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    max_positions=40960,
    qk_norm=True,
  ),
  "llama-3.1-8b": ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=5e5,
    max_positions=131072,
  ),
  "smollm2-135m": ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    max_positions=8192,
  ),
  "small": ModelConfig(
    family="qwen3",
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=40960,
    qk_norm=True,
  ),
}
"""Shapes as their configs give them."""


def random_weight(seed: int, rows: int, columns: int) -> formats.QTensor:
  """An autofp6 tensor `[rows, columns]` with 20% of its subgroups refined."""
  rng = np.random.default_rng(seed)
  keys = jax.random.split(jax.random.key(seed), 3)
  groups = columns // formats.GROUP
  counts = rng.permutation(np.resize([0, 0, 1, 1, 2], groups))
  mask = np.zeros((groups, formats.SUBGROUPS_PER_GROUP), bool)
  for row, count in zip(mask, counts, strict=True):
    row[rng.permutation(4)[:count]] = True
  scale = jax.random.randint(keys[1], (rows, groups), 0x18, 0x48)
  return formats.QTensor(
    codes=jax.random.bits(keys[0], (rows, columns // 2), jnp.uint8),
    group_scale=scale.astype(jnp.uint8).view(jnp.float8_e4m3fn),
    tensor_scale=jnp.asarray(0.01, jnp.float32),
    refinement_mask=formats.pack_mask(jnp.asarray(mask.reshape(-1))),
    offsets=jax.random.bits(keys[2], (rows, int(counts.sum())), jnp.uint8),
    format="autofp6",
    decoding="exponent",
    columns=columns,
  )


def without_offsets(weight: formats.QTensor) -> formats.QTensor:
  """The base of an autofp6 tensor, as nvfp4."""
  return dataclasses.replace(
    weight, format="nvfp4", refinement_mask=None, offsets=None
  )


def implementation() -> Implementation:
  """What multiplies by quantized weights here."""
  return "mosaic_sm90" if mosaic_sm90.runs() else "xla"


def stacked(
  weights: Sequence[formats.QTensor], max_rows: int
) -> ExpandedWeight | FragmentWeight:
  """Weights of all layers, as `implementation()` takes them.

  Args:
    weights: One for each layer.
    max_rows: Rows of x in the largest decode batch (`prepack`).
  """
  if implementation() == "mosaic_sm90":
    return prepack([[one] for one in weights], max_rows=max_rows)
  expanded = [expand([one]) for one in weights]
  return jax.tree.map(lambda *arrays: jnp.stack(arrays), *expanded)


def random_decoder(
  config: ModelConfig, format: Format, decode_rows: int = 16
) -> Decoder:
  """A decoder whose projections are in `format`, the rest in bfloat16.

  Args:
    config: Its shape.
    format: Of the projections.
    decode_rows: Requests in the largest decode batch (`build_decoder`).
  """
  heads = config.num_heads * config.head_dim
  kv_heads = config.num_kv_heads * config.head_dim
  width, inner = config.hidden_size, config.intermediate_size
  shapes = {
    "qkv": (heads + 2 * kv_heads, width),
    "output": (width, heads),
    "gate_up": (2 * inner, width),
    "down": (width, inner),
  }
  layers = config.num_layers
  make = _random_dense if format == "bf16" else _random_quantized
  projections: dict[str, Any] = {
    name: make(number, layers, shape, format, decode_rows)
    for number, (name, shape) in enumerate(shapes.items())
  }

  def norm(*shape):
    return RMSNorm(jnp.ones(shape), config.rms_norm_eps)

  decoder_layers = DecoderLayer(
    input_norm=norm(layers, width),
    mlp_norm=norm(layers, width),
    q_norm=norm(layers, config.head_dim) if config.qk_norm else None,
    k_norm=norm(layers, config.head_dim) if config.qk_norm else None,
    **projections,
  )
  return Decoder(
    embedding=_random_bfloat16(101, (config.vocab_size, width)),
    layers=decoder_layers,
    norm=norm(width),
    head=_random_bfloat16(102, (config.vocab_size, width)),
    config=config,
    choices={"bf16": (), "nvfp4": (4,), "autofp6": (4, 6)}[format],
  )


def _random_bfloat16(seed, shape):
  """Bits of numbers between 2^-6 and 2^-5, of either sign."""
  bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint16)
  return (bits & 0x807F) | (121 << 7)


def _random_dense(seed, layers, shape, format, decode_rows):
  return DenseLinear(_random_bfloat16(seed, (layers, *shape)))


def _random_quantized(seed, layers, shape, format, decode_rows):
  weights = [
    random_weight(1000 * seed + layer, *shape) for layer in range(layers)
  ]
  if format == "nvfp4":
    weights = [without_offsets(weight) for weight in weights]
  config = ActivationConfig(decoding=weights[0].decoding)
  return QuantizedLinear(stacked(weights, decode_rows), None, config)
