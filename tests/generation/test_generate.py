"""Generation: batches, precisions, stopping, streaming, errors."""

import dataclasses
import types

import numpy as np
import pytest

import autoematic_jax
from autoematic_jax import language_model
from autoematic_jax.checkpoints import convert
from autoematic_jax.errors import PrecisionError
from autoematic_jax.errors import PromptError
from autoematic_jax.pallas_kernels.extended_gemm import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90
from autoematic_jax.policy import PolicyConfig
from autoematic_jax.sampling import SamplingConfig

PROMPTS = [[5, 9, 33, 2, 71], [8] * 40, [96, 3], list(range(2, 21))]


def test_batch_gives_each_prompt_what_it_gets_alone(load_as):
  model = load_as("autofp6")
  # Of random weights every step is uncertain: all would start at the top.
  policy = dataclasses.replace(model.policy, high_entropy_level=2)
  model = model.with_policy(policy)
  options = {"max_new_tokens": 12, "ignore_eos": True}
  together = autoematic_jax.generate(model, PROMPTS, **options)
  assert together.trace.shape == (11, 4, 4)
  # Requests must disagree somewhere, or the mixed batch was not tested.
  levels = together.trace
  assert (levels != levels[..., :1]).any()
  for request, prompt in enumerate(PROMPTS):
    alone = autoematic_jax.generate(model, prompt, **options)
    assert alone.token_ids[0] == together.token_ids[request]
    np.testing.assert_array_equal(alone.trace[..., 0], levels[..., request])
    np.testing.assert_array_equal(
      alone.prefill_levels[:, 0], together.prefill_levels[:, request]
    )


def test_seeded_sampling_does_not_depend_on_the_batch(load_as):
  model = load_as("autofp6")
  settings = [
    SamplingConfig(temperature=1.0, top_k=20, top_p=0.9, seed=seed)
    for seed in (1, 2, 1)
  ]
  prompts = [PROMPTS[0]] * 3
  options = {"max_new_tokens": 10, "ignore_eos": True}
  first = autoematic_jax.generate(
    model, prompts, sampling=settings, **options
  ).token_ids
  assert first[0] == first[2] != first[1]
  alone = autoematic_jax.generate(
    model, prompts[1], sampling=settings[1], **options
  )
  assert alone.token_ids[0] == first[1]


@pytest.mark.parametrize("precision", [2, 4, 6, [2, 4, 6, 4]])
def test_fixed_precision_is_what_runs(load_as, precision):
  result = autoematic_jax.generate(
    load_as("autofp6"),
    PROMPTS[0],
    precision=precision,
    max_new_tokens=4,
    ignore_eos=True,
  )
  wanted = np.broadcast_to(precision, (4,))
  np.testing.assert_array_equal(result.prefill_levels[:, 0], wanted)
  assert (result.trace[..., 0] == wanted).all()


@pytest.mark.parametrize(
  ("name", "offered"),
  [
    ("nvfp4", (4,)),
    ("fp6g", (6,)),
    ("autofp8", ("adaptive", 2, 4, 6, 8)),
    ("bf16", ("bf16",)),
    ("fp32", ("fp32",)),
  ],
)
def test_every_format_generates_at_its_precisions(load_as, name, offered):
  model = load_as(name)
  assert model.precisions == offered
  result = autoematic_jax.generate(
    model, PROMPTS[0], precision=offered[-1], max_new_tokens=3, ignore_eos=True
  )
  assert len(result.token_ids[0]) == 3
  with pytest.raises(PrecisionError, match="offered"):
    autoematic_jax.generate(model, PROMPTS[0], precision="int4")


def test_stop_tokens_and_limits(load_as):
  model = load_as("autofp6")
  free = autoematic_jax.generate(
    model, PROMPTS[0], max_new_tokens=12, ignore_eos=True
  )
  tokens = free.token_ids[0]
  assert free.finish_reasons == ["length"]
  stop = tokens[5]
  first = tokens.index(stop)
  result = autoematic_jax.generate(
    model,
    [PROMPTS[0], PROMPTS[1]],
    max_new_tokens=12,
    ignore_eos=True,
    stop_token_ids=[stop],
  )
  assert result.token_ids[0] == tokens[: first + 1]
  assert result.finish_reasons[0] == "stop"
  assert not result.trace[first:, :, 0].any()


def test_generation_ends_at_the_context(load_as):
  result = autoematic_jax.generate(
    load_as("autofp6"), [4] * 90, max_new_tokens=50, ignore_eos=True
  )
  assert len(result.token_ids[0]) == 6
  assert result.finish_reasons == ["length"]


def test_stream_yields_what_generate_returns(load_as):
  model = load_as("autofp6")
  stream = autoematic_jax.stream(
    model, PROMPTS[:2], max_new_tokens=11, ignore_eos=True
  )
  seen = [[], []]
  while True:
    try:
      chunk = next(stream)
    except StopIteration as end:
      result = end.value
      break
    seen[chunk.request] += chunk.token_ids
  assert seen == result.token_ids


@pytest.mark.parametrize(
  ("prompt", "options", "message"),
  [
    ([], {}, "no prompt"),
    ([[]], {}, "empty"),
    ([[97]], {}, "97 is outside the vocabulary of 97"),
    ([[-1]], {}, "-1 is outside"),
    ([[3] * 96], {}, "96 tokens; the model's context is 96"),
    ("text", {}, "no tokenizer"),
    ([3, 4], {"max_new_tokens": 0}, "max_new_tokens=0"),
    ([3, 4], {"sampling": [SamplingConfig()] * 2}, "2 sampling settings"),
  ],
)
def test_bad_prompts_are_refused(load_as, prompt, options, message):
  with pytest.raises(PromptError, match=message):
    autoematic_jax.generate(load_as("autofp6"), prompt, **options)


def test_levels_for_each_layer_are_checked(load_as):
  with pytest.raises(PrecisionError, match="needs 4 values out of"):
    autoematic_jax.generate(load_as("autofp6"), [3, 4], precision=[4, 6])


@pytest.mark.parametrize(
  "bad",
  [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"seed": -1}],
)
def test_sampling_settings_are_checked(bad):
  with pytest.raises(PromptError, match=next(iter(bad))):
    SamplingConfig(**bad)


def test_kernels_for_another_device_are_refused(tmp_path, source):
  path = tmp_path / "autofp6"
  convert(source, path, progress=False)
  with pytest.raises(PrecisionError, match="Hopper.*cpu"):
    autoematic_jax.load(path, implementation="mosaic_sm90")


def test_a_policy_of_levels_that_the_kernels_lack(
  monkeypatch, tmp_path, source
):
  path = tmp_path / "autofp6"
  convert(source, path, progress=False)
  monkeypatch.setattr(mosaic_sm90, "check_device", lambda: None)
  with pytest.raises(PrecisionError, match=r"\(2, 4, 6\).*runs at \(4, 6\)"):
    autoematic_jax.load(
      path,
      implementation="mosaic_sm90",
      policy=PolicyConfig(levels=(2, 4, 6)),
    )


@pytest.mark.parametrize(
  ("fmt", "levels", "expected"),
  [
    ("autofp6", (4, 6), "mosaic_sm90"),
    ("autofp6", (2, 4, 6), "xla"),
    ("nvfp4", (4,), "mosaic_sm90"),
    ("autofp8", (4, 6), "xla"),
    ("fp32", (), "xla"),
  ],
)
def test_the_kernels_are_taken_where_they_run(
  monkeypatch, tmp_path, source, fmt, levels, expected
):
  convert(source, tmp_path / "out", format=fmt, progress=False)
  monkeypatch.setattr(mosaic_sm90, "check_device", lambda: None)
  for hopper in (True, False):
    monkeypatch.setattr(mosaic_sm90, "runs", lambda hopper=hopper: hopper)
    policy = PolicyConfig(levels=levels) if levels else None
    model = autoematic_jax.load(tmp_path / "out", policy=policy)
    assert model.implementation == (expected if hopper else "xla")


def test_the_kernels_are_not_taken_for_experts(monkeypatch):
  monkeypatch.setattr(mosaic_sm90, "runs", lambda: True)
  policy = PolicyConfig(levels=(4, 6))
  for experts, expected in ((None, "mosaic_sm90"), (object(), "xla")):
    checkpoint = types.SimpleNamespace(
      format="autofp6", config=types.SimpleNamespace(experts=experts)
    )
    chosen = language_model._implementation(checkpoint, (4, 6), policy)
    assert chosen == expected


def test_every_layer_is_packed_for_the_kernels(monkeypatch, tmp_path, source):
  path = tmp_path / "autofp6"
  convert(source, path, progress=False)
  monkeypatch.setattr(mosaic_sm90, "check_device", lambda: None)
  model = autoematic_jax.load(path, implementation="mosaic_sm90")
  assert model.levels == model.decoder.choices == (4, 6)
  layers, config = model.decoder.layers, model.config
  heads = config.num_heads * config.head_dim
  kv_heads = 2 * config.num_kv_heads * config.head_dim
  for linear, outputs, inputs in (
    (layers.qkv, heads + kv_heads, config.hidden_size),
    (layers.output, config.hidden_size, heads),
    (layers.gate_up, 2 * config.intermediate_size, config.hidden_size),
    (layers.down, config.hidden_size, config.intermediate_size),
  ):
    weight = linear.weight.get_value()
    assert isinstance(weight, FragmentWeight)
    assert (weight.layers, weight.rows, weight.inputs) == (4, outputs, inputs)
