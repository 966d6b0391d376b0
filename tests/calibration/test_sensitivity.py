"""Fisher information of projections against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax.calibration import prefix
from autoematic_jax.calibration import sensitivity
from autoematic_jax.models import registry
from autoematic_jax.models.builder import build_layer

CONFIG = registry.config_from_hf(
  {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
  }
)

# One output of each input's projections.
BIASES = {
  "qkv": ("self_attn.v_proj.bias", 5, 24 + 12 + 5),
  "o": ("self_attn.o_proj.bias", 3, 3),
  "gate_up": ("mlp.up_proj.bias", 7, 32 + 7),
  "down": ("mlp.down_proj.bias", 11, 11),
}


@pytest.fixture(scope="module")
def model():
  rng = np.random.default_rng(0)
  tensors = {
    name: rng.standard_normal(spec.shape).astype(np.float32) * 0.3
    for name, spec in registry.tensor_specs(CONFIG).items()
  }
  layers = [
    {
      name.removeprefix(f"model.layers.{number}."): tensor
      for name, tensor in tensors.items()
      if name.startswith(f"model.layers.{number}.")
    }
    for number in range(2)
  ]
  return tensors, layers


def measure(tensors, layers, tokens):
  measured = sensitivity.measure(
    CONFIG,
    tokens,
    embedding=tensors["model.embed_tokens.weight"],
    norm=tensors["model.norm.weight"],
    head=tensors["lm_head.weight"],
    read_layer=lambda number: layers[number],
    decoding="exponent",
  )
  return {number: found for number, _, found in measured}


def log_probabilities(tensors, layers, tokens):
  hidden = jnp.asarray(tensors["model.embed_tokens.weight"][tokens])
  for number, weights in enumerate(layers):
    layer = build_layer(CONFIG, weights, number)
    hidden = prefix.run_layer(layer, hidden, CONFIG)
  mean = jnp.mean(jnp.square(hidden), axis=-1, keepdims=True)
  normed = hidden / jnp.sqrt(mean + 1e-5) * tensors["model.norm.weight"]
  return jax.nn.log_softmax(normed @ tensors["lm_head.weight"].T)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("reader", list(BIASES))
def test_gradients_match_finite_differences(model, number, reader):
  """Of one token, whose gradient by a bias is that by the output."""
  tensors, layers = model
  tokens = np.array([[9]], np.int32)
  found = measure(tensors, layers, tokens)[number].gradients[reader]
  key = jax.random.split(jax.random.key(0), 1)[0]
  drawn = jax.random.categorical(
    key, log_probabilities(tensors, layers, tokens)
  )
  name, entry, output = BIASES[reader]
  values = []
  for change in (-0.01, 0.01):
    moved = [dict(layer) for layer in layers]
    bias = moved[number][name].copy()
    bias[entry] += change
    moved[number][name] = bias
    log_p = log_probabilities(tensors, moved, tokens)
    values.append(float(log_p[0, 0, drawn[0, 0]]))
  slope = (values[1] - values[0]) / 0.02
  assert found[output] == pytest.approx(slope**2, rel=0.05, abs=1e-8)


def test_means_over_samples(model):
  tensors, layers = model
  tokens = np.array([[9, 4, 1, 7], [3, 3, 8, 2]], np.int32)
  found = measure(tensors, layers, tokens)
  first = prefix.Prefix(
    CONFIG, tensors["model.embed_tokens.weight"][tokens].astype(np.float32)
  )
  layer = build_layer(CONFIG, layers[0], 0)
  (read,) = first.inputs(layer, prefix.QKV)
  np.testing.assert_allclose(
    found[0].inputs["qkv"], np.square(read).mean((0, 1)), rtol=1e-5
  )
  assert found[0].inputs["down"].shape == (32,)
  assert found[1].gradients["qkv"].shape == (48,)
  gains = found[1].activation_gains["down"]
  assert gains.shape == (32,)
  assert gains.sum() > 0
