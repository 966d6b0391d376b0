"""Tasks whose answers the model writes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import PromptError
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.generation import generate
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.precisions import parse_precision
from autoematic_jax.prompts import encode_prompt
from autoematic_jax.results import GenerationResult

_SPARE_TOKENS = 8
"""Tokens that an answer may take beyond the longest right one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """One item.

  Attributes:
    name: Names it in errors.
    prompt: What the model reads.
    answer: What its task's score compares with.
  """

  name: str
  prompt: str
  answer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationTask:
  """Questions, answered greedily.

  Attributes:
    name: Of the task.
    items: The questions.
    score: Of a question and the text that the model wrote: `score`, from 0
      to 1, and further values whose names end in `_score`.
    chat: Whether prompts go through the chat template.
    max_new_tokens: Tokens of an answer at most; None where the right answer
      is the whole of what the model should write, and gives the length.
  """

  name: str
  items: tuple[Question, ...]
  score: Callable[[Question, str], dict[str, float]]
  chat: bool = True
  max_new_tokens: int | None = None

  def encode(
    self, model: LanguageModel, indices: Sequence[int]
  ) -> list[list[int]]:
    """Token ids of some items' prompts.

    Raises:
      AutoematicError: The model has no chat template, or a prompt leaves no
        room for its answer.
    """
    if self.chat and not model.tokenizer.has_chat_template:
      raise AutoematicError(
        f"task {self.name} asks through a chat template, and the checkpoint"
        " has none"
      )
    return [self._encode(model, self.items[index]) for index in indices]

  def _encode(self, model, item):
    where = f"task {self.name}, item {item.name}"
    try:
      ids = encode_prompt(model, item.prompt, chat=self.chat)
    except PromptError as error:
      raise AutoematicError(f"{where}: {error}") from error
    context = model.config.max_positions
    answer = 0 if self.max_new_tokens else _answer_tokens(model, item)
    if len(ids) + answer > context:
      raise AutoematicError(
        f"{where}: {len(ids)} tokens and {answer} of the answer do not fit the"
        f" model's context of {context}"
      )
    return ids

  def run(
    self,
    model: LanguageModel,
    precision: str,
    indices: Sequence[int],
    *,
    batch: int,
  ) -> Iterator[tuple[int, Record]]:
    """Answers and scores some items, those of like length together.

    Args:
      model: Who answers.
      precision: A name as `parse_precision` takes it.
      indices: Of the items, at least one.
      batch: Items to answer at once, at most.

    Yields:
      Each item's index and record: its scores, the answer, the mean bits of
      its passes and how many there were.
    """
    encoded = dict(zip(indices, self.encode(model, indices), strict=True))
    new_tokens = self.max_new_tokens or _SPARE_TOKENS + max(
      _answer_tokens(model, item) for item in self.items
    )
    for rows in batches(sorted(indices, key=lambda i: len(encoded[i])), batch):
      result = generate(
        model,
        [encoded[index] for index in rows],
        max_new_tokens=new_tokens,
        precision=parse_precision(precision),
      )
      # Rows that fill up the last batch repeat items that it holds already.
      for row, index in enumerate(dict.fromkeys(rows)):
        text = result.texts[row]
        yield (
          index,
          {
            **self.score(self.items[index], text),
            "answer": text,
            **_bits(result, row),
          },
        )


def batches(indices: Sequence[int], size: int) -> list[list[int]]:
  """As few batches of at most `size` as do, all of one size.

  The last is filled up with its own items again, since another size would be
  compiled anew.
  """
  count = -(-len(indices) // size)
  size = -(-len(indices) // count)
  rows = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
  rows[-1] = [rows[-1][i % len(rows[-1])] for i in range(size)]
  return rows


def _answer_tokens(model, item):
  """Tokens of the right answer, without the one that ends it."""
  ids = model.tokenizer.encode(item.answer, add_special_tokens=False)
  return len(ids)


def _bits(result: GenerationResult, row: int) -> Record:
  """Prefill is one pass of a request, each decode step another."""
  decode = result.trace[:, :, row]
  steps = decode[(decode > 0).any(axis=1)]
  passes = np.concatenate([result.prefill_levels[:, row][None], steps])
  return {"bits": float(passes.mean()), "passes": len(passes)}
