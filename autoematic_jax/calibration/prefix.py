"""The calibration text on its way through the layers that are done."""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.context import Context
from autoematic_jax.models.decoder_layer import DecoderLayer
from autoematic_jax.models.layers import Precision

_TOKENS_AT_ONCE = 4096

# What reads an input: the last part of `TensorSpec.input_group`.
QKV, OUTPUT, GATE_UP, DOWN = "qkv", "o", "gate_up", "down"


class Prefix:
  """Hidden states of every sample before the layer that is next.

  They are kept on the host in float32.

  Args:
    config: The model's config.
    hidden: `[samples, T, D]`: the embedded text, or what `hidden` was later.
  """

  def __init__(self, config: ModelConfig, hidden: Float[np.ndarray, "S T D"]):
    self._config = config
    self.hidden = hidden

  def inputs(
    self, layer: DecoderLayer, reader: str, *, pass_on: bool = False
  ) -> Iterator[Float[Array, "B T K"]]:
    """What a projection of the layer reads, some samples at a time.

    Args:
      layer: The layer, alone in its stack; projections before `reader` are
        already those that the hidden states are to pass through.
      reader: QKV, OUTPUT, GATE_UP or DOWN.
      pass_on: Whether to add what the projection makes of it to the hidden
        states, which saves keeping it for `add_output`.
    """
    read = _READERS[reader]
    for rows in self._chunks():
      chunk = jnp.asarray(self.hidden[rows])
      x = read(layer, chunk, _context(self._config, *chunk.shape[:2]))
      if pass_on:
        self.hidden[rows] += np.asarray(_PROJECTIONS[reader](layer, x))
      yield x

  def add_output(
    self,
    layer: DecoderLayer,
    reader: str,
    inputs: Iterable[Float[np.ndarray, "B T K"]],
  ) -> None:
    """Adds what a block's last projection makes of its inputs.

    Args:
      layer: The layer.
      reader: OUTPUT or DOWN.
      inputs: All that `inputs` yielded for it.
    """
    project = _PROJECTIONS[reader]
    for rows, x in zip(self._chunks(), inputs, strict=True):
      self.hidden[rows] += np.asarray(project(layer, jnp.asarray(x)))

  def _chunks(self) -> Iterator[slice]:
    samples, tokens, _ = self.hidden.shape
    size = max(1, _TOKENS_AT_ONCE // tokens)
    for start in range(0, samples, size):
      yield slice(start, min(start + size, samples))


def run_layer(
  layer: DecoderLayer, hidden: Float[Array, "B T D"], config: ModelConfig
) -> Float[Array, "B T D"]:
  """Hidden states after a layer that is alone in its stack."""
  context = _context(config, *hidden.shape[:2])
  out, _ = layer(hidden, context, _cache(hidden, config), _precision(hidden))
  return out


def _context(config, batch, tokens):
  positions = jnp.broadcast_to(
    jnp.arange(tokens, dtype=jnp.int32), (batch, tokens)
  )
  return Context.of(config, positions, jnp.ones((batch, tokens), bool))


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
def _output(layer, x):
  return layer.project_mixed(x, _precision(x))


@jax.jit
def _down(layer, x):
  return layer.project_gated(x, _precision(x))


_PROJECTIONS = {OUTPUT: _output, DOWN: _down}
