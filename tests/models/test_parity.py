"""The decoder in float32 against transformers, on small random models."""

import numpy as np
import pytest
from decoder_logits import run

from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax.models import registry
from autoematic_jax.models.builder import build_decoder

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip(
  "transformers", reason="parity needs transformers"
)

LLAMA3_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 500000.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}
QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
BASE = {
  "model_type": "llama",
  "vocab_size": 131,
  "hidden_size": 48,
  "intermediate_size": 112,
  "num_hidden_layers": 3,
  "max_position_embeddings": 16384,
  "rms_norm_eps": 1e-5,
}
CONFIGS = {
  "smollm2": dict(
    BASE,
    num_attention_heads=3,
    num_key_value_heads=1,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
  ),
  "llama-3.1": dict(
    BASE,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=False,
    rope_parameters=LLAMA3_ROPE,
  ),
  "deepseek-r1-distill-llama": dict(
    BASE,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
    rope_parameters=LLAMA3_ROPE,
  ),
  "qwen3-0.6b": dict(
    BASE,
    model_type="qwen3",
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    tie_word_embeddings=True,
    rope_parameters=QWEN3_ROPE,
  ),
  "qwen3-8b": dict(
    BASE,
    model_type="qwen3",
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=False,
    attention_bias=True,
    rope_parameters=QWEN3_ROPE,
  ),
  "linear-rope": dict(
    BASE,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    rope_parameters={
      "rope_type": "linear",
      "rope_theta": 10000.0,
      "factor": 4.0,
    },
  ),
}


def make_pair(name):
  """A random transformers model and ours with the same weights."""
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(**CONFIGS[name])
  theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.normal_(0, 0.2)
  hf = config.to_dict()
  hf["architectures"] = [type(theirs).__name__]
  ours = registry.config_from_hf(hf)
  tensors = {key: value.numpy() for key, value in theirs.state_dict().items()}
  specs = registry.tensor_specs(ours)
  assert {n: tensors[n].shape for n in specs} == {
    n: s.shape for n, s in specs.items()
  }
  layers = [
    {
      key.removeprefix(f"model.layers.{layer}."): value
      for key, value in tensors.items()
      if key.startswith(f"model.layers.{layer}.")
    }
    for layer in range(ours.num_layers)
  ]
  return theirs, build_decoder(ours, layers=layers, rest=tensors)


def empty_cache(decoder, batch, capacity):
  config = decoder.config
  return kv_cache.init_cache(
    num_layers=config.num_layers,
    batch=batch,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    capacity=capacity,
    codec=kv_codecs.DenseCodec(),
  )


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_logits(name):
  theirs, decoder = make_pair(name)
  tokens = np.random.default_rng(0).integers(0, 131, (2, 75), dtype=np.int32)
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  cache = empty_cache(decoder, 2, 80)
  prefill, cache = run(decoder, tokens[:, :70], 0, cache, "prefill")
  np.testing.assert_allclose(prefill, expected[:, :70], atol=1e-4)
  for position in range(70, 75):
    step = tokens[:, position : position + 1]
    logits, cache = run(decoder, step, position, cache, "decode")
    np.testing.assert_allclose(logits[:, 0], expected[:, position], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "llama-3.1", "qwen3-0.6b"])
def test_logits_past_position_8192(name):
  theirs, decoder = make_pair(name)
  tokens = np.random.default_rng(1).integers(0, 131, (1, 8200), dtype=np.int32)
  with torch.no_grad():
    expected = theirs(
      torch.tensor(tokens, dtype=torch.long), logits_to_keep=16
    ).logits.numpy()
  cache = empty_cache(decoder, 1, 8200)
  logits, cache = run(decoder, tokens[:, :8192], 0, cache, "prefill")
  np.testing.assert_allclose(logits[:, -8:], expected[:, :8], atol=1e-4)
  for position in range(8192, 8200):
    step = tokens[:, position : position + 1]
    logits, cache = run(decoder, step, position, cache, "decode")
    np.testing.assert_allclose(
      logits[:, 0], expected[:, position - 8184], atol=1e-4
    )
