"""A tiny random model, converted once to each format that a test asks for."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.models import registry

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 97,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 96,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": True,
  "eos_token_id": 1,
}


@pytest.fixture(scope="session")
def source(tmp_path_factory):
  """A Hugging Face folder with random weights and no tokenizer."""
  folder = tmp_path_factory.mktemp("tiny")
  rng = np.random.default_rng(0)
  specs = registry.tensor_specs(registry.config_from_hf(CONFIG))
  tensors = {
    name: rng.standard_normal(spec.shape).astype(np.float32) * 0.2
    for name, spec in specs.items()
  }
  save_file(tensors, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(CONFIG))
  return folder


@pytest.fixture(scope="session")
def load_as(source, tmp_path_factory):
  """Loads the model in a format; each format is converted once."""
  loaded = {}

  def load(name):
    if name not in loaded:
      path = tmp_path_factory.mktemp("converted") / name
      convert(source, path, format=name, progress=False)
      loaded[name] = autoematic_jax.load(path)
    return loaded[name]

  return load
