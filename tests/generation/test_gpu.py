"""Whole models on a Hopper GPU against the same models by XLA."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.models.transformer import ADAPTIVE

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


@pytest.fixture(scope="module")
def text(models):
  ids = models["xla"].tokenizer.encode(
    "The harbour of the town was built in the 19th century, when ships from"
    " the north brought timber, coal and iron. In 1904 a second basin was dug."
  )
  return jnp.asarray(ids, jnp.int32)


def log_probabilities(model, text, bits):
  forced = np.full((model.config.num_layers,), bits, np.int32)
  hidden, _ = teacher_forcing.hidden_states(model, text, forced, "decode")
  return jax.nn.log_softmax(model.decoder.logits(hidden, one_by_one=False))


def answers(model, precision, prompts=PROMPTS):
  return autoematic_jax.generate(
    model, prompts, precision=precision, max_new_tokens=24, ignore_eos=True
  )


@pytest.mark.parametrize("bits", [4, 6, ADAPTIVE])
def test_a_text_is_scored_as_well_as_by_xla(models, checkpoint, text, bits):
  """Equal tokens would be too much to ask.

  A change of 1e-6 in a norm's scale flips roundings whose divergence is that
  between 4 and 6 bits.
  """
  dense = autoematic_jax.load(checkpoint, dense=True)
  wanted = log_probabilities(dense, text, 32)
  ours, theirs = (
    jnp.mean(
      jnp.sum(
        jnp.exp(wanted)
        * (wanted - log_probabilities(models[name], text, bits)),
        axis=1,
      )
    )
    for name in ("mosaic_sm90", "xla")
  )
  assert ours < 1.3 * theirs + 0.01


def test_a_batch_answers_as_its_requests_alone(models):
  model = models["mosaic_sm90"]
  together = answers(model, "adaptive")
  for request, prompt in enumerate(PROMPTS):
    alone = answers(model, "adaptive", [prompt])
    assert alone.token_ids[0] == together.token_ids[request]
