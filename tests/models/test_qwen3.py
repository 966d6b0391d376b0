"""Qwen3's config, its files and generation from them."""

import functools
import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import open_source
from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import registry

# The attributes of the published files, with small numbers.
CONFIG = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 0,
  "eos_token_id": 1,
  "head_dim": 32,
  "hidden_act": "silu",
  "hidden_size": 48,
  "initializer_range": 0.02,
  "intermediate_size": 96,
  "max_position_embeddings": 96,
  "max_window_layers": 2,
  "model_type": "qwen3",
  "num_attention_heads": 4,
  "num_hidden_layers": 2,
  "num_key_value_heads": 2,
  "rms_norm_eps": 2.0**-20,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0",
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 97,
}
PROMPTS = [[5, 9, 33, 2, 71], [8] * 20, [96, 3]]


@pytest.fixture(scope="module")
def weights():
  rng = np.random.default_rng(0)
  specs = registry.tensor_specs(registry.config_from_hf(CONFIG))
  return {
    name: rng.normal(size=spec.shape, scale=0.2).astype(np.float32)
    for name, spec in specs.items()
  }


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
  path = tmp_path_factory.mktemp("qwen3")
  save_file(weights, path / "model.safetensors")
  (path / "config.json").write_text(json.dumps(CONFIG))
  return path


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    (
      {"layer_types": ["full_attention", "sliding_attention"]},
      "'sliding_attention' in layer_types",
    ),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"num_experts": 8}, "num_experts=8 is not handled for qwen3"),
    ({"head_dim": None}, "lacks 'head_dim'"),
    (
      {
        "rope_scaling": {
          "rope_type": "yarn",
          "factor": 4.0,
          "original_max_position_embeddings": 32768,
        }
      },
      "rope type 'yarn' is not handled",
    ),
  ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(changes, message):
  with pytest.raises(UnsupportedModelError, match=message):
    registry.config_from_hf(CONFIG | changes)


@pytest.mark.parametrize(
  "changes",
  [
    {"sliding_window": 4096},
    {"layer_types": ["full_attention"] * 2},
  ],
)
def test_an_unused_window_changes_nothing(changes):
  config = registry.config_from_hf(CONFIG | changes)
  assert config == registry.config_from_hf(CONFIG)


@pytest.fixture(scope="module")
def load_as(folder, tmp_path_factory):
  """Loads the model in a format; each format is converted once."""

  @functools.cache
  def load(format):
    path = tmp_path_factory.mktemp("converted") / format
    convert(folder, path, format=format)
    return autoematic_jax.load(path)

  return load


@pytest.mark.parametrize(
  "format", ["autofp6", "autofp8", "nvfp4", "fp6g", "bf16", "fp32"]
)
def test_every_format_generates_at_its_precisions(load_as, format):
  model = load_as(format)
  assert model.config.qk_norm
  for precision in model.precisions:
    result = autoematic_jax.generate(
      model,
      PROMPTS[0],
      precision=precision,
      max_new_tokens=3,
      ignore_eos=True,
    )
    assert len(result.token_ids[0]) == 3


def test_batch_gives_each_prompt_what_it_gets_alone(load_as):
  options = {"max_new_tokens": 8, "ignore_eos": True}
  model = load_as("autofp6")
  together = autoematic_jax.generate(model, PROMPTS, **options)
  for request, prompt in enumerate(PROMPTS):
    alone = autoematic_jax.generate(model, prompt, **options)
    assert alone.token_ids[0] == together.token_ids[request]


@pytest.fixture
def gguf_file(weights, tmp_path):
  """The same model as the gguf package names its keys and tensors."""
  path = tmp_path / "tiny.gguf"
  writer = gguf.GGUFWriter(path, "qwen3")
  writer.add_block_count(CONFIG["num_hidden_layers"])
  writer.add_context_length(CONFIG["max_position_embeddings"])
  writer.add_embedding_length(CONFIG["hidden_size"])
  writer.add_feed_forward_length(CONFIG["intermediate_size"])
  writer.add_head_count(CONFIG["num_attention_heads"])
  writer.add_head_count_kv(CONFIG["num_key_value_heads"])
  writer.add_key_length(CONFIG["head_dim"])
  writer.add_value_length(CONFIG["head_dim"])
  writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
  writer.add_rope_freq_base(CONFIG["rope_theta"])
  names = gguf.get_tensor_name_map(
    gguf.MODEL_ARCH.QWEN3, CONFIG["num_hidden_layers"]
  )
  for name, values in weights.items():
    writer.add_tensor(names.get_name(name, (".weight",)), values)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_gguf_and_safetensors_hold_the_same_model(gguf_file, weights):
  source = open_source(gguf_file)
  ours = registry.config_from_hf(source.config)
  assert ours == registry.config_from_hf(CONFIG)
  assert source.names == set(weights)
  for name, values in weights.items():
    np.testing.assert_array_equal(source.read(name), values, err_msg=name)
