"""Saved transformers models, converted by the command, give the same logits."""

import numpy as np
import pytest
from decoder_logits import run

import autoematic_jax
from autoematic_jax.cli.main import parse_arguments

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip(
  "transformers", reason="parity needs transformers"
)

BASE = {
  "vocab_size": 131,
  "hidden_size": 48,
  "intermediate_size": 112,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 512,
  "rms_norm_eps": 1e-6,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
LINEAR_ROPE = {
  "rope_type": "linear",
  "rope_theta": 1000000.0,
  "factor": 8.0,
}
LLAMA3_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 500000.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 256,
}
WINDOW = 16
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 32}
CONFIGS = {
  "qwen2": dict(BASE, tie_word_embeddings=False, rope_parameters=DEFAULT_ROPE),
  "qwen2-tied": dict(
    BASE, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
  ),
  "mistral": dict(
    BASE, head_dim=12, sliding_window=WINDOW, rope_parameters=DEFAULT_ROPE
  ),
  "mistral-tied": dict(
    BASE,
    head_dim=32,
    sliding_window=None,
    tie_word_embeddings=True,
    rope_parameters=LINEAR_ROPE,
  ),
  "gemma2": dict(
    BASE,
    head_dim=16,
    sliding_window=WINDOW,
    query_pre_attn_scalar=24,
    rope_parameters=LOCAL_ROPE,
  ),
  "gemma3_text": dict(
    BASE,
    head_dim=32,
    sliding_window=WINDOW,
    query_pre_attn_scalar=20,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    rope_parameters={
      "full_attention": LINEAR_ROPE,
      "sliding_attention": LOCAL_ROPE,
    },
  ),
  "gemma3_text-untied": dict(
    BASE,
    head_dim=16,
    num_hidden_layers=7,
    sliding_window=WINDOW,
    query_pre_attn_scalar=16,
    tie_word_embeddings=False,
    rope_parameters={
      "full_attention": DEFAULT_ROPE,
      "sliding_attention": LOCAL_ROPE,
    },
  ),
  "qwen3_moe": dict(
    BASE,
    **EXPERTS,
    head_dim=32,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    rope_parameters=DEFAULT_ROPE,
  ),
  "qwen3_moe-tied": dict(
    BASE,
    **EXPERTS,
    head_dim=16,
    num_experts_per_tok=3,
    norm_topk_prob=False,
    attention_bias=True,
    tie_word_embeddings=True,
    rope_parameters=DEFAULT_ROPE,
  ),
}


def random_model(name):
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(
    name.split("-")[0], attn_implementation="eager", **CONFIGS[name]
  )
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(0, 0.2)
  return model


def converted(folder, *options):
  destination = folder.with_name("converted")
  args = parse_arguments(
    ["autoematic", "convert", str(folder), str(destination), *options]
  )
  assert args.run(args) == 0
  return autoematic_jax.load(destination)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_logits(name, tmp_path):
  theirs = random_model(name)
  theirs.save_pretrained(tmp_path / "saved")
  ours = converted(tmp_path / "saved", "--format", "fp32", "--quiet")
  tokens = np.random.default_rng(0).integers(0, 131, (2, 75), dtype=np.int32)
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  cache = ours.init_cache(2, 80)
  prefill, cache = run(ours.decoder, tokens[:, :70], 0, cache, "prefill")
  np.testing.assert_allclose(prefill, expected[:, :70], atol=1e-4)
  for position in range(70, 75):
    step = tokens[:, position : position + 1]
    logits, cache = run(ours.decoder, step, position, cache, "decode")
    np.testing.assert_allclose(logits[:, 0], expected[:, position], atol=1e-4)
