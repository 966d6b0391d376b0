"""A tiny model with a tokenizer, converted, for the commands to run on."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from autoematic_jax.checkpoints import convert
from autoematic_jax.cli import main
from autoematic_jax.models import registry

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 320,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "max_position_embeddings": 96,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": True,
  "eos_token_id": 2,
}

CHAT_TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, trained_bpe):
  """Paths of the model as autofp6 and as fp32."""
  folder = tmp_path_factory.mktemp("commands")
  source = folder / "source"
  source.mkdir()
  rng = np.random.default_rng(0)
  specs = registry.tensor_specs(registry.config_from_hf(CONFIG))
  tensors = {
    name: rng.standard_normal(spec.shape).astype(np.float32) * 0.3
    for name, spec in specs.items()
  }
  save_file(tensors, source / "model.safetensors")
  (source / "config.json").write_text(json.dumps(CONFIG))
  trained_bpe.save(str(source / "tokenizer.json"))
  (source / "tokenizer_config.json").write_text(
    json.dumps(
      {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
      }
    )
  )
  paths = {name: folder / name for name in ("autofp6", "fp32")}
  convert(source, paths["autofp6"], progress=False)
  convert(source, paths["fp32"], format="fp32", progress=False)
  return paths


@pytest.fixture
def run(capsys):
  """Runs a command line in this process; returns code, stdout and stderr."""

  def call(*words):
    words = ["autoematic", *map(str, words)]
    args = main.parse_arguments(words)
    code = args.run(args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err

  return call
