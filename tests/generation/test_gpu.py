"""Whole models on a Hopper GPU against the same models by XLA."""

from pathlib import Path

import numpy as np
import pytest

import autoematic_jax
from autoematic_jax.checkpoints import convert

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


@pytest.mark.parametrize("precision", [4, 6, "adaptive"])
def test_tokens_and_levels_are_those_of_xla(models, precision):
  ours, theirs = (
    answers(models[name], precision) for name in ("mosaic_sm90", "xla")
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
