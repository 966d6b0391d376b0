"""Whole models on a Hopper GPU against the same models by XLA."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.prompts import encode_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

PROMPTS = ["Sort: 93 41 17 88", "Compute 4821 + 977", "The harbour"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  root = Path(__file__).resolve().parents[2]
  out = tmp_path_factory.mktemp("gpu") / "reference"
  convert(root / "models/reference/checkpoint", out, progress=False)
  return out


@pytest.fixture(scope="module")
def models(checkpoint):
  return {
    name: autoematic_jax.load(checkpoint, implementation=name)
    for name in ("xla", "mosaic_sm90")
  }


def answers(model, precision, prompts=PROMPTS):
  return autoematic_jax.generate(
    model, prompts, precision=precision, max_new_tokens=24, ignore_eos=True
  )


def assert_same_or_tied(model, ids, ours, theirs, levels):
  """Answers may part where two tokens are as good as equal."""
  differ = [
    n
    for n, pair in enumerate(zip(ours, theirs, strict=True))
    if pair[0] != pair[1]
  ]
  if not differ:
    return
  before = jnp.asarray([*ids, *theirs[: differ[0]]], jnp.int32)
  forced = np.full((model.config.num_layers,), levels, np.int32)
  hidden, _ = teacher_forcing.hidden_states(model, before, forced, "prefill")
  logits = model.decoder.logits(hidden[-1:])[0]
  gap = logits[theirs[differ[0]]] - logits[ours[differ[0]]]
  assert abs(gap) < 0.02 * jnp.std(logits)


@pytest.mark.parametrize("bits", [4, 6])
def test_tokens_are_those_of_xla(models, bits):
  ours, theirs = (
    answers(models[name], bits) for name in ("mosaic_sm90", "xla")
  )
  for prompt, *tokens in zip(
    PROMPTS, ours.token_ids, theirs.token_ids, strict=True
  ):
    ids = encode_prompt(models["xla"], prompt, chat=False)
    assert_same_or_tied(models["xla"], ids, *tokens, bits)


def test_levels_of_the_policy_are_those_of_xla(models):
  ours, theirs = (
    answers(models[name], "adaptive") for name in ("mosaic_sm90", "xla")
  )
  assert ours.token_ids == theirs.token_ids
  np.testing.assert_array_equal(ours.prefill_levels, theirs.prefill_levels)
  np.testing.assert_array_equal(ours.trace, theirs.trace)


def test_a_batch_answers_as_its_requests_alone(models):
  model = models["mosaic_sm90"]
  together = answers(model, "adaptive")
  for request, prompt in enumerate(PROMPTS):
    alone = answers(model, "adaptive", [prompt])
    assert alone.token_ids[0] == together.token_ids[request]
