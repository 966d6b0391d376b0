"""A request's hidden states are its own, bit for bit, whatever stands beside.

Lengths, padding and cache capacity of the batch differ from those of the
request alone, and shapes lie on both sides of every threshold that XLA's CPU
backend was seen to have.
"""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import autoematic_jax
from autoematic_jax import policy as policy_lib
from autoematic_jax.checkpoints import convert
from autoematic_jax.models import registry
from autoematic_jax.models.transformer import ADAPTIVE

LENGTHS = (90, 5)
BUCKETS = (96, 32)


def config(hidden, heads, kv_heads, head_dim, family="Llama"):
  return {
    "architectures": [f"{family}ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": hidden,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "head_dim": head_dim,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
  }


CASES = {
  "48 wide": (config(48, 3, 1, 16), "autofp6", ADAPTIVE),
  "96 wide, heads of 24": (config(96, 4, 2, 24, "Qwen3"), "autofp6", ADAPTIVE),
  "1024 wide": (config(1024, 2, 1, 64), "autofp6", ADAPTIVE),
  "fp6g": (config(48, 2, 2, 32), "fp6g", 6),
}


@pytest.fixture(params=CASES, scope="module")
def case(request, tmp_path_factory):
  """A random model and the level that its layers are forced to."""
  hf_config, name, level = CASES[request.param]
  folder = tmp_path_factory.mktemp("source")
  rng = np.random.default_rng(0)
  save_file(
    {
      name: rng.standard_normal(spec.shape).astype(np.float32) * 0.2
      for name, spec in registry.tensor_specs(
        registry.config_from_hf(hf_config)
      ).items()
    },
    folder / "model.safetensors",
  )
  (folder / "config.json").write_text(json.dumps(hf_config))
  convert(folder, folder / "converted", format=name, progress=False)
  return autoematic_jax.load(folder / "converted"), level


@partial(jax.jit, static_argnames=("phase", "config"))
def run_layers(
  decoder, tokens, start, lengths, cache, policy, forced, **static
):
  hidden, cache, policy, trace = decoder.run_layers(
    tokens,
    start=start,
    lengths=lengths,
    cache=cache,
    policy=policy,
    forced=forced,
    phase=static["phase"],
    policy_config=static["config"],
  )
  return hidden, cache, policy, trace.bits


def run(model, level, tokens, start, lengths, cache, phase):
  batch = len(lengths)
  if phase == "prefill":
    policy = policy_lib.start_prefill(model.policy, batch)
  else:
    policy = policy_lib.start_step(
      model.policy,
      policy_lib.start_decode(model.policy, batch),
      jnp.full((batch,), 0.5),
    )
  return run_layers(
    model.decoder,
    jnp.asarray(tokens, jnp.int32),
    jnp.asarray(start, jnp.int32),
    jnp.asarray(lengths, jnp.int32),
    cache,
    policy,
    jnp.full((model.config.num_layers,), level, jnp.int32),
    phase=phase,
    config=model.policy,
  )


def test_prefill_and_decode_give_each_request_what_it_gets_alone(case):
  model, level = case
  batch = len(LENGTHS)
  tokens = np.random.default_rng(1).integers(0, 97, (batch, 96))
  cache = model.init_cache(batch, 256)
  together = run(model, level, tokens, [0] * batch, LENGTHS, cache, "prefill")
  step = run(
    model, level, tokens[:, :1], LENGTHS, [1] * batch, together[1], "decode"
  )
  for request, (length, bucket) in enumerate(
    zip(LENGTHS, BUCKETS, strict=True)
  ):
    padded = np.zeros((1, bucket), np.int32)
    padded[0, :length] = tokens[request, :length]
    alone = run(
      model, level, padded, [0], [length], model.init_cache(1, 128), "prefill"
    )
    np.testing.assert_array_equal(
      alone[0][0, :length], together[0][request, :length]
    )
    for name, plane in alone[1].planes.items():
      np.testing.assert_array_equal(
        plane[:, 0, :, :length],
        together[1].planes[name][:, request, :, :length],
      )
    assert_same_policy(alone[2], together[2], request)
    np.testing.assert_array_equal(alone[3][:, 0], together[3][:, request])
    next_alone = run(
      model, level, tokens[request, None, :1], [length], [1], alone[1], "decode"
    )
    np.testing.assert_array_equal(next_alone[0][0], step[0][request])
    assert_same_policy(next_alone[2], step[2], request)


def assert_same_policy(alone, together, request):
  for field in dataclasses.fields(alone):
    one = np.asarray(getattr(alone, field.name))
    all_of_them = np.asarray(getattr(together, field.name))
    np.testing.assert_array_equal(one[..., 0], all_of_them[..., request])
