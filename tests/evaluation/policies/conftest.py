"""A tiny random model with a chat template, quantized and not."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.cli import main
from autoematic_jax.evaluation.policies import oracle
from autoematic_jax.evaluation.policies import recording
from autoematic_jax.evaluation.policies.conversations import Conversation
from autoematic_jax.models import registry

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 320,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 6,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "max_position_embeddings": 160,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": True,
  "eos_token_id": 2,
}

CHAT_TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CAPACITY = 128
"""Positions that the fixtures' conversations fit into."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, trained_bpe):
  """Paths of the model as autofp6, of levels 2, 4 and 6, and as fp32."""
  folder = tmp_path_factory.mktemp("policies")
  source = folder / "source"
  source.mkdir()
  rng = np.random.default_rng(0)
  specs = registry.tensor_specs(registry.config_from_hf(CONFIG))
  # Rounded, as a checkpoint keeps embedding and norms in bfloat16: both then
  # share them.
  tensors = {
    name: (rng.standard_normal(spec.shape) * 0.2)
    .astype(ml_dtypes.bfloat16)
    .astype(np.float32)
    for name, spec in specs.items()
  }
  save_file(tensors, source / "model.safetensors")
  (source / "config.json").write_text(json.dumps(CONFIG))
  trained_bpe.save(str(source / "tokenizer.json"))
  (source / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})
  )
  paths = {name: folder / name for name in ("autofp6", "fp32")}
  convert(
    source,
    paths["autofp6"],
    policy={"levels": (2, 4, 6), "high_entropy_level": 2},
    progress=False,
  )
  convert(source, paths["fp32"], format="fp32", progress=False)
  return paths


@pytest.fixture(scope="session")
def judged(checkpoints):
  """Random weights make every step uncertain, so all of them start alike."""
  model = autoematic_jax.load(checkpoints["autofp6"])
  return model.with_policy(
    dataclasses.replace(model.policy, high_entropy_level=2)
  )


@pytest.fixture(scope="session")
def baseline(checkpoints):
  return autoematic_jax.load(checkpoints["fp32"])


@pytest.fixture(scope="session")
def recordings(baseline):
  """A conversation of three turns and one of one."""
  told = [
    Conversation(
      name="three", turns=("The capital of", " is Paris, and", " live there?")
    ),
    Conversation(name="one", turns=("def f(x):",)),
  ]
  return [
    recording.record(baseline, item, max_new_tokens=5, capacity=CAPACITY)
    for item in told
  ]


@pytest.fixture(scope="session")
def trace(judged, baseline, recordings):
  """The oracle's passes of the first conversation, by budget."""

  def call(budget, index=0):
    options = oracle.OracleOptions(levels=judged.levels, budget=budget)
    return oracle.trace(
      judged, baseline, recordings[index], options, capacity=CAPACITY
    )

  return call


@pytest.fixture(scope="session")
def rows(recordings, trace):
  """What a report of the oracle holds about both conversations."""
  return [
    {**item.to_dict(), "passes": trace(MIDDLE, index)}
    for index, item in enumerate(recordings)
  ]


MIDDLE = 0.01
"""A budget for which the model's layers need different levels."""


@pytest.fixture
def run(capsys):
  """Runs a command line in this process; returns code and stdout."""

  def call(*words):
    words = ["autoematic", *map(str, words), "--compilation-cache", ""]
    args = main.parse_arguments(words)
    code = args.run(args)
    return code, capsys.readouterr().out

  return call
