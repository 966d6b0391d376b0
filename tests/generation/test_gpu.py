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


def answers(model, precision, prompts=PROMPTS):
  return autoematic_jax.generate(
    model, prompts, precision=precision, max_new_tokens=24, ignore_eos=True
  )


@pytest.mark.parametrize("bits", [4, 6, ADAPTIVE])
def test_a_text_is_scored_as_by_xla(models, text, bits):
  """Greedy tokens would not do: one flipped rounding moves a logit by 0.3."""
  found = {}
  for name, model in models.items():
    forced = np.full((model.config.num_layers,), bits, np.int32)
    hidden, levels = teacher_forcing.hidden_states(
      model, text, forced, "decode"
    )
    logits = model.decoder.logits(hidden, one_by_one=False)
    found[name] = jax.nn.log_softmax(logits), np.asarray(levels)
  (ours, our_levels), (theirs, their_levels) = (
    found[name] for name in ("mosaic_sm90", "xla")
  )
  divergence = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=1)
  # Between 4 and 6 bits it is a hundred times this.
  assert jnp.mean(divergence) < 2e-3
  assert np.mean(our_levels == their_levels) >= 0.99


def test_a_batch_answers_as_its_requests_alone(models):
  model = models["mosaic_sm90"]
  together = answers(model, "adaptive")
  for request, prompt in enumerate(PROMPTS):
    alone = answers(model, "adaptive", [prompt])
    assert alone.token_ids[0] == together.token_ids[request]
