"""Configs of the families, what they refuse, and generation from each."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from decoder_logits import run
from safetensors.numpy import save_file

import autoematic_jax
from autoematic_jax.calibration import Calibrator
from autoematic_jax.calibration import prefix
from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.errors import PrecisionError
from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import registry
from autoematic_jax.models.builder import build_decoder
from autoematic_jax.models.builder import build_layer

BASE = {
  "hidden_size": 48,
  "intermediate_size": 96,
  "max_position_embeddings": 128,
  "num_attention_heads": 4,
  "num_hidden_layers": 2,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
  "vocab_size": 97,
}
# The attributes of published files, with small numbers.
CONFIGS = {
  "qwen2": {
    **BASE,
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "max_window_layers": 21,
    "sliding_window": 32768,
    "use_mrope": False,
    "use_sliding_window": False,
  },
  "mistral": {
    **BASE,
    "architectures": ["MistralForCausalLM"],
    "head_dim": 32,
    "hidden_act": "silu",
    "sliding_window": 8,
  },
  "gemma": {
    **BASE,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "rope_local_base_freq": 100.0,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
  },
  "qwen3_moe": {
    **BASE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
  },
}
PROMPTS = [[5, 9, 33, 2, 71], [8, 1] * 10]


def write_folder(folder, config):
  rng = np.random.default_rng(0)
  specs = registry.tensor_specs(registry.config_from_hf(config))
  weights = {
    name: rng.normal(size=spec.shape, scale=0.2).astype(np.float32)
    for name, spec in specs.items()
  }
  folder.mkdir()
  save_file(weights, folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(config))
  return folder


def converted(path, family, format):
  folder = write_folder(path / "source", CONFIGS[family])
  levels = (4, 6) if format == "autofp6" else None
  convert(folder, path / "converted", format=format, levels=levels)
  return autoematic_jax.load(path / "converted")


@pytest.mark.parametrize("family", ["gemma", "mistral", "qwen2"])
def test_packed_weights_generate(family, tmp_path):
  model = converted(tmp_path, family, "autofp6")
  result = autoematic_jax.generate(
    model, PROMPTS[1], max_new_tokens=3, ignore_eos=True
  )
  assert len(result.token_ids[0]) == 3
  assert set(np.unique(result.trace)) <= {4, 6}


def test_experts_give_each_prompt_of_a_batch_what_it_gets_alone(tmp_path):
  model = converted(tmp_path, "qwen3_moe", "autofp6")
  options = {"max_new_tokens": 6, "ignore_eos": True}
  together = autoematic_jax.generate(model, PROMPTS, **options)
  alone = autoematic_jax.generate(model, PROMPTS[1], **options)
  assert alone.token_ids[0] == together.token_ids[1]


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen2", {"attention_bias": True}, "attention_bias=True"),
    ("qwen2", {"num_key_value_heads": None}, "lacks 'num_key_value_heads'"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("mistral", {"sliding_window": -1}, "sliding_window=-1 must be > 0"),
    ("gemma", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    ("gemma", {"rope_local_base_freq": None}, "lacks 'rope_local_base_freq'"),
    ("gemma", {"layer_types": ["full_attention"]}, "1 layer_types"),
    (
      "gemma",
      {"layer_types": ["full_attention", "chunked_attention"]},
      "chunked_attention",
    ),
    (
      "gemma",
      {"rope_parameters": {"rope_theta": 10000.0}},
      "needs 'full_attention' and 'sliding_attention'",
    ),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional"),
    (
      "gemma",
      {"architectures": ["Gemma2ForCausalLM"], "rope_local_base_freq": None},
      "rope_local_base_freq",
    ),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("qwen3_moe", {"num_local_experts": 8}, r"\[3, 8\]"),
    ("qwen3_moe", {"num_experts_per_tok": 4}, "per_token=4"),
    ("qwen3_moe", {"norm_topk_prob": None}, "lacks 'norm_topk_prob'"),
  ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(
  family, changes, message
):
  with pytest.raises(UnsupportedModelError, match=message):
    registry.config_from_hf(CONFIGS[family] | changes)


def test_a_mistral_config_must_say_whether_there_is_a_window():
  config = dict(CONFIGS["mistral"])
  del config["sliding_window"]
  with pytest.raises(UnsupportedModelError, match="lacks 'sliding_window'"):
    registry.config_from_hf(config)


def test_gemma_configs_of_either_age_say_the_same():
  old = CONFIGS["gemma"]
  new = {
    name: value
    for name, value in old.items()
    if name not in ("rope_theta", "rope_local_base_freq")
  } | {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
      "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
      "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
  }
  config = registry.config_from_hf(old)
  assert config == registry.config_from_hf(new)
  assert config.full_layers == (1,)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_survives_its_json(family):
  config = registry.config_from_hf(CONFIGS[family])
  data = json.loads(json.dumps(config.to_dict()))
  assert type(config).from_dict(data) == config


def test_experts_are_refused_where_they_do_not_run():
  config = registry.config_from_hf(CONFIGS["qwen3_moe"])
  with pytest.raises(PrecisionError, match="runs no experts"):
    build_decoder(config, layers=[], rest={}, implementation="mosaic_sm90")


def test_packed_experts_are_those_of_the_dense_model(tmp_path):
  """Without offsets, whose arrays are empty, and nearly the same logits."""
  packed = converted(tmp_path, "qwen3_moe", "nvfp4")
  dense = autoematic_jax.load(tmp_path / "converted", dense=True)
  logits = [
    run(
      model.decoder,
      np.asarray([PROMPTS[1]]),
      0,
      model.init_cache(1, 20),
      "prefill",
      bits=4,
    )[0]
    for model in (packed, dense)
  ]
  assert np.corrcoef(*map(np.ravel, logits))[0, 1] > 0.9


def test_experts_are_not_calibrated(tmp_path):
  folder = write_folder(tmp_path / "source", CONFIGS["qwen3_moe"])
  calibrator = Calibrator(np.arange(64, dtype=np.int64).reshape(2, 32))
  with pytest.raises(UnsupportedModelError, match="without --calibrate"):
    convert(folder, tmp_path / "converted", calibrator=calibrator)


def test_calibration_runs_the_text_through_the_model(tmp_path):
  """Its layers, each alone in a stack, keep their windows and ropes."""
  model = converted(tmp_path, "gemma", "fp32")
  decoder, config = model.decoder, model.config
  tokens = jnp.asarray([PROMPTS[1]])
  checkpoint = load_checkpoint(tmp_path / "converted")
  text = prefix.Prefix(config, np.array(decoder.embed(tokens)))
  for number in range(config.num_layers):
    layer = build_layer(config, checkpoint.layer(number), number)
    for reader in (prefix.OUTPUT, prefix.DOWN):
      list(text.inputs(layer, reader, pass_on=True))
  expected, _ = run(
    decoder, np.asarray(tokens), 0, model.init_cache(1, 20), "prefill"
  )
  logits = decoder.logits(jnp.asarray(text.hidden[0]))
  np.testing.assert_allclose(logits, expected[0], atol=1e-4)
