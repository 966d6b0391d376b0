"""What each layer costs at each level, and the floors that follow."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.evaluation import text_scores
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.language_model import LanguageModel


def measure(
  judged: LanguageModel,
  reference: LanguageModel,
  windows: Int[np.ndarray, "W T"],
  journal: Journal,
) -> Float[np.ndarray, "N L"]:
  """What each level of each layer costs while all others run at the highest.

  Args:
    judged: The quantized model, at each of the N levels of its policy.
    reference: Whose next-token distributions count as right, at its highest
      precision: the same model in full precision, or `judged` itself.
    windows: Token ids of a text.
    journal: Remembers finished values.

  Returns:
    Mean KL divergence from the reference on the text, nats; the last row is
    that of all layers at the highest level.
  """
  levels, layers = judged.policy.levels, judged.config.num_layers
  costs = np.empty((len(levels), layers))
  target = _targets(reference, windows)
  plan = [(len(levels) - 1, 0)]
  plan += [
    (n, layer) for n in range(len(levels) - 1) for layer in range(layers)
  ]
  for n, layer in tqdm(plan, desc="sensitivity", unit="layer"):
    key = ("sensitivity", levels[n], layer)
    record = journal.find(*key)
    if record is None:
      forced = np.full((layers,), levels[-1], np.int32)
      forced[layer] = levels[n]
      kl = mean_divergence(judged, reference, windows, forced, target)
      record = {"kl": kl}
      journal.add(*key, record=record)
    costs[n, layer] = record["kl"]
  costs[-1] = costs[-1, 0]
  return costs


def _targets(reference, windows):
  """Gives the reference's hidden states of a window, each run once."""
  highest = reference.levels[-1] if reference.levels else 32
  forced = np.full((reference.config.num_layers,), highest, np.int32)

  @functools.cache
  def target(index):
    tokens = jnp.asarray(windows[index])
    hidden, _ = teacher_forcing.hidden_states(
      reference, tokens, forced, "prefill"
    )
    return hidden

  return target


def mean_divergence(judged, reference, windows, forced, target=None) -> float:
  """Mean KL divergence from the reference with every layer's level given."""
  target = target or _targets(reference, windows)
  kl = []
  for index, window in enumerate(windows):
    tokens = jnp.asarray(window)
    hidden, _ = teacher_forcing.hidden_states(judged, tokens, forced, "prefill")
    scored = text_scores.score(
      judged.decoder, hidden, reference.decoder, target(index), tokens
    )
    kl.append(scored.kl.mean())
  return float(np.mean(kl))


def floors(
  levels: Sequence[int],
  costs: Float[np.ndarray, "N L"],
  max_kl: float,
  highest: int,
) -> list[int]:
  """The lowest level of each layer that costs little enough.

  Args:
    levels: The N levels, ascending.
    costs: From `measure`.
    max_kl: What a layer alone may add to the KL divergence of all layers at
      the highest level, nats.
    highest: Bits that no floor exceeds.

  Returns:
    Bits of each layer; `highest`, or the level below it, where none is within
    bounds.
  """
  levels = [level for level in levels if level <= highest] or levels[:1]
  within = (costs - costs[-1] <= max_kl)[: len(levels)]
  within[-1] = True
  return [int(levels[index]) for index in within.argmax(axis=0)]
