"""Multiple choice by the likelihood of each choice."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.evaluation import text_scores
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.generation_run import bucket
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.precisions import forced_levels
from autoematic_jax.precisions import parse_precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceItem:
  """One item.

  Attributes:
    name: Names it in errors.
    context: Raw text before the choice, and a space between them.
    choices: Texts to choose from.
    expected_index: Of the right one.
  """

  name: str
  context: str
  choices: tuple[str, ...]
  expected_index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
  """A context with one of its choices.

  Attributes:
    ids: Tokens of both.
    first: Position of the choice's first token.
  """

  ids: list[int]
  first: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceTask:
  """Items of which the model finds one choice the likeliest.

  Attributes:
    name: Of the task.
    items: The items.
    per_token: Compares the mean log-likelihood of a choice's tokens, which
      does not favour short choices, not their sum.
  """

  name: str
  items: tuple[ChoiceItem, ...]
  per_token: bool = False

  def encode(
    self, model: LanguageModel, indices: Sequence[int]
  ) -> list[list[Scored]]:
    """Token ids of every choice of some items.

    Raises:
      AutoematicError: An item does not fit the model's context, or its
        context has no token.
    """
    return [self._encode(model, self.items[index]) for index in indices]

  def _encode(self, model, item):
    where = f"task {self.name}, item {item.name}"
    context = model.tokenizer.encode(item.context)
    scored = []
    for choice in item.choices:
      ids = model.tokenizer.encode(f"{item.context} {choice}")
      if len(ids) > model.config.max_positions:
        raise AutoematicError(
          f"{where}: {len(ids)} tokens do not fit the model's context of"
          f" {model.config.max_positions}"
        )
      first = _common_prefix(context, ids)
      if not first:
        raise AutoematicError(f"{where}: no token precedes the choices")
      scored.append(Scored(ids=ids, first=first))
    return scored

  def run(
    self,
    model: LanguageModel,
    precision: str,
    indices: Sequence[int],
    *,
    batch: int,
  ) -> Iterator[tuple[int, Record]]:
    """Scores some items.

    Args:
      model: Who chooses.
      precision: A name as `parse_precision` takes it.
      indices: Of the items.
      batch: Has no effect: choices run one at a time, each padded to 32, 48,
        64, 96, 128, ... tokens.

    Yields:
      Each item's index and record: its score, the choice, the sum of
      log-likelihoods of each choice in nats, the mean bits of its passes and
      how many there were.
    """
    del batch
    forced = forced_levels(model, parse_precision(precision))
    for index, scored in zip(indices, self.encode(model, indices), strict=True):
      likelihoods, bits = zip(
        *(_run(model, forced, choice) for choice in scored), strict=True
      )
      reduce = np.mean if self.per_token else np.sum
      picked = int(np.argmax([reduce(values) for values in likelihoods]))
      yield (
        index,
        {
          "score": float(picked == self.items[index].expected_index),
          "picked": picked,
          "log_likelihoods": [float(np.sum(values)) for values in likelihoods],
          "bits": float(np.mean(bits)),
          "passes": len(bits),
        },
      )


def _common_prefix(context, ids):
  """Tokens that a text shares with its beginning tokenized alone.

  Fewer than all where the beginning's last token takes in what follows it.
  """
  pairs = enumerate(zip(context, ids, strict=False))
  return next(
    (i for i, (a, b) in pairs if a != b), min(len(context), len(ids) - 1)
  )


def _run(model, forced, scored):
  """Log-likelihoods `[choice's tokens]`, and the pass's mean bits."""
  length = len(scored.ids)
  padded = np.zeros((bucket(length),), np.int32)
  padded[:length] = scored.ids
  tokens = jnp.asarray(padded)
  hidden, bits = teacher_forcing.one_pass(model, tokens, length, forced)
  values = text_scores.log_likelihoods(
    model.decoder, hidden, tokens, scored.first, length
  )
  return values.astype(np.float64), float(np.mean(bits))
