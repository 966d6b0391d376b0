"""The calibration text on its way through the layers that are done."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax.calibration.hessian import HessianSum
from autoematic_jax.models import attention
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.layers import Precision
from autoematic_jax.models.transformer import Context
from autoematic_jax.models.transformer import DecoderLayer
from autoematic_jax.models.transformer import rope_frequencies

_TOKENS_AT_ONCE = 4096

# What reads an input: the last part of `TensorSpec.input_group`.
QKV, OUTPUT, GATE_UP, DOWN = "qkv", "o", "gate_up", "down"


class Prefix:
  """Hidden states of every sample before the layer that is next.

  Only these are kept, on the host in float32; what lies inside a layer is
  computed again for each of its projections, so that memory does not grow
  with the width of the MLP.

  Args:
    config: The model's config.
    tokens: `[samples, T]` token ids.
    embedding: `[V, D]`.
  """

  def __init__(
    self,
    config: ModelConfig,
    tokens: Int[np.ndarray, "S T"],
    embedding: Float[np.ndarray, "V D"],
  ):
    self._config = config
    self.hidden = np.asarray(embedding[tokens], np.float32)

  def hessian(
    self, layer: DecoderLayer, reader: str
  ) -> Float[np.ndarray, "K K"]:
    """`mean(x x^T)` of what a projection of the layer reads.

    Args:
      layer: The layer, alone in its stack; projections before `reader` are
        already those of the quantized model.
      reader: QKV, OUTPUT, GATE_UP or DOWN.
    """
    read = _READERS[reader]
    total = None
    for _, chunk, context in self._chunks():
      x = read(layer, chunk, context)
      x = x.reshape(-1, x.shape[-1])
      if total is None:
        total = HessianSum(x.shape[1])
      total.add(x)
    assert total is not None
    return total.mean()

  def pass_attention(self, layer: DecoderLayer) -> None:
    """Adds the attention block's output to the hidden states."""
    self._replace(partial(_after_attention, layer))

  def pass_mlp(self, layer: DecoderLayer) -> None:
    """Adds the MLP block's output to the hidden states."""
    self._replace(partial(_after_mlp, layer))

  def _replace(self, function: Callable[..., Array]) -> None:
    for rows, chunk, context in self._chunks():
      self.hidden[rows] = function(chunk, context)

  def _chunks(self):
    samples, tokens, _ = self.hidden.shape
    size = max(1, _TOKENS_AT_ONCE // tokens)
    for start in range(0, samples, size):
      rows = slice(start, min(start + size, samples))
      chunk = jnp.asarray(self.hidden[rows])
      yield rows, chunk, _context(self._config, *chunk.shape[:2])


def _context(config, batch, tokens):
  positions = jnp.broadcast_to(
    jnp.arange(tokens, dtype=jnp.int32), (batch, tokens)
  )
  return Context(
    positions=positions,
    token_mask=jnp.ones((batch, tokens), bool),
    rope=attention.rope_tables(positions, rope_frequencies(config)),
    config=config,
  )


def _only():
  """Index of a layer that is alone in its stack."""
  return jnp.int32(0)


def _precision(hidden):
  return Precision.of(_only(), jnp.zeros((hidden.shape[0],), jnp.int32), ())


def _cache(hidden, config):
  return kv_cache.init_cache(
    num_layers=1,
    batch=hidden.shape[0],
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    capacity=hidden.shape[1],
    codec=kv_codecs.DenseCodec(),
  )


@jax.jit
def _qkv_input(layer, hidden, context):
  del context
  return layer.input_norm(hidden, _only())


@jax.jit
def _output_input(layer, hidden, context):
  cache = _cache(hidden, context.config)
  return layer.mix(hidden, context, cache, _precision(hidden))[0]


@jax.jit
def _gate_up_input(layer, hidden, context):
  del context
  return layer.mlp_norm(hidden, _only())


@jax.jit
def _down_input(layer, hidden, context):
  del context
  return layer.gated(hidden, _precision(hidden))


_READERS = {
  QKV: _qkv_input,
  OUTPUT: _output_input,
  GATE_UP: _gate_up_input,
  DOWN: _down_input,
}


@jax.jit
def _after_attention(layer, hidden, context):
  cache = _cache(hidden, context.config)
  return hidden + layer.attend(hidden, context, cache, _precision(hidden))[0]


@jax.jit
def _after_mlp(layer, hidden, context):
  del context
  return hidden + layer.mlp(hidden, _precision(hidden))
