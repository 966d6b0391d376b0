"""How much an error in each projection changes the next-token distribution.

Near the full-precision model, the KL divergence that an error e in a
projection's output causes is `1/2 E[(g . e)^2]`, where g is the gradient of the
log-probability of a token that the model itself draws (Fisher information).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from autoematic_jax import formats
from autoematic_jax.calibration import activations
from autoematic_jax.calibration import prefix
from autoematic_jax.models import attention
from autoematic_jax.models.builder import build_layer
from autoematic_jax.models.builder import build_norm
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.decoder_layer import DecoderLayer
from autoematic_jax.models.layers import output_head

Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
  """Mean squares over the tokens of a text, for one layer.

  Attributes:
    gradients: For each input of the layer (`qkv`, `o`, `gate_up`, `down`), the
      mean square of the gradient by each output of the projections that read
      it, in their order.
    inputs: For each, the mean square of its columns.
    activation_gains: For each, the mean squared error of its columns that
      refining the activations removes; empty where that was not asked for.
  """

  gradients: Mapping[str, Float[np.ndarray, "N"]]
  inputs: Mapping[str, Float[np.ndarray, "K"]]
  activation_gains: Mapping[str, Float[np.ndarray, "K"]]


def measure(
  config: ModelConfig,
  tokens: Int[np.ndarray, "S T"],
  *,
  embedding: Float[np.ndarray, "V D"],
  norm: Float[np.ndarray, "D"],
  head: Float[np.ndarray, "V D"],
  read_layer: Callable[[int], Weights],
  decoding: formats.Decoding | None,
) -> Iterator[tuple[int, Weights, LayerSensitivity]]:
  """Runs a text forward and back through the full-precision model.

  Each layer is read twice, and one is in memory at a time, beside the hidden
  states of the text before every layer: keep the text short.

  Args:
    config: The model's config.
    tokens: The text.
    embedding: Its embedding.
    norm: Scale of its final norm.
    head: Its output head.
    read_layer: Tensors of a layer, float32, by name relative to the layer.
    decoding: Step of the offsets of activations; None leaves out what these
      gain.

  Yields:
    From the last layer to the first its number, its tensors as they were read,
    and its sensitivity.
  """
  scale = np.float32(config.embedding_scale)
  hidden = [
    [jnp.asarray(embedding[row][None] * scale, jnp.float32) for row in tokens]
  ]
  for number in range(config.num_layers):
    layer = build_layer(config, dict(read_layer(number)), number)
    hidden.append([_forward(layer, h, config=config) for h in hidden[-1]])
  last = hidden.pop()
  final_norm = build_norm(norm, config)
  kernel = jnp.asarray(head, jnp.float32)
  keys = jax.random.split(jax.random.key(0), len(last))
  gradients = [
    _head_gradient(final_norm, kernel, h, key, cap=config.logit_softcap)
    for h, key in zip(last, keys, strict=True)
  ]
  for number in reversed(range(config.num_layers)):
    weights = read_layer(number)
    layer = build_layer(config, dict(weights), number)
    total: Any = None
    for sample, h in enumerate(hidden.pop()):
      gradients[sample], sums = _backward(
        layer, h, gradients[sample], config=config, decoding=decoding
      )
      total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    means = jax.tree.map(
      lambda x: np.asarray(x, np.float64) / tokens.size, total
    )
    yield number, weights, LayerSensitivity(**means)


def _run(layer, hidden, probes, config):
  """The layer with probes added to its projections, and what these read."""
  read = {}

  def tapped(reader, linear):
    def project(x, precision, before=None):
      if before is not None:
        x = before(x, precision.layer)
      read[reader] = x.reshape(-1, x.shape[-1])
      return linear(x, precision) + probes[reader]

    return cast(Any, project)

  tapped_layer = DecoderLayer(
    input_norm=layer.input_norm,
    qkv=tapped(prefix.QKV, layer.qkv),
    output=tapped(prefix.OUTPUT, layer.output),
    mlp_norm=layer.mlp_norm,
    gate_up=tapped(prefix.GATE_UP, layer.gate_up),
    down=tapped(prefix.DOWN, layer.down),
    q_norm=layer.q_norm,
    k_norm=layer.k_norm,
    post_attention_norm=layer.post_attention_norm,
    post_mlp_norm=layer.post_mlp_norm,
    window=None if layer.window is None else layer.window.get_value(),
    activation=layer.activation,
  )
  return prefix.run_layer(tapped_layer, hidden, config), read


@jax.jit(static_argnames="config")
def _forward(layer, hidden, *, config):
  return prefix.run_layer(layer, hidden, config)


@jax.jit(static_argnames=("config", "decoding"))
def _backward(layer, hidden, gradient, *, config, decoding):
  """Gradient before the layer, and sums for `LayerSensitivity`."""
  linears = {
    prefix.QKV: layer.qkv,
    prefix.OUTPUT: layer.output,
    prefix.GATE_UP: layer.gate_up,
    prefix.DOWN: layer.down,
  }
  probes = {
    reader: jnp.zeros((*hidden.shape[:2], linear.kernel.get_value().shape[-2]))
    for reader, linear in linears.items()
  }
  _, back, read = jax.vjp(
    lambda h, p: _run(layer, h, p, config), hidden, probes, has_aux=True
  )
  before, by_output = back(gradient)
  sums = {
    "gradients": {
      reader: jnp.sum(jnp.square(g), axis=(0, 1))
      for reader, g in by_output.items()
    },
    "inputs": {
      reader: jnp.sum(jnp.square(x), axis=0) for reader, x in read.items()
    },
    "activation_gains": {
      reader: activations.refinement_gain(x, decoding)
      for reader, x in read.items()
      if decoding is not None
    },
  }
  return before, sums


@jax.jit(static_argnames="cap")
def _head_gradient(norm, head, hidden, key, *, cap):
  """Gradient of the log-probability of a drawn token at every position."""

  def log_probabilities(h):
    logits = output_head(norm(h[0]), head, one_by_one=False)
    if cap is not None:
      logits = attention.soft_capped(logits, cap)
    return jax.nn.log_softmax(logits)[None]

  log_p, back = jax.vjp(log_probabilities, hidden)
  drawn = jax.random.categorical(key, log_p)
  (gradient,) = back(jax.nn.one_hot(drawn, log_p.shape[-1]))
  return gradient
