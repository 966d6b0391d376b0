"""Full-precision answers, on which everything later is teacher-forced."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoematic_jax.evaluation.policies.conversations import Conversation
from autoematic_jax.evaluation.policies.conversations import encode
from autoematic_jax.evaluation.policies.passes import Pass
from autoematic_jax.evaluation.policies.passes import Session
from autoematic_jax.evaluation.policies.passes import decode_pass
from autoematic_jax.evaluation.policies.passes import passes_of
from autoematic_jax.evaluation.policies.passes import turn_pass
from autoematic_jax.generation_run import bucket
from autoematic_jax.language_model import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
  """A conversation with its answers.

  Attributes:
    name: Of the conversation.
    turns: Token ids of each turn.
    answers: Token ids of the answer to each, its stop token included.
  """

  name: str
  turns: list[list[int]]
  answers: list[list[int]]

  @property
  def passes(self) -> list[Pass]:
    """Everything that a model reads, in order."""
    return passes_of(self.turns, self.answers)

  def to_dict(self) -> dict[str, Any]:
    """A JSON-ready dict that `from_dict` reads back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, data: dict[str, Any]) -> "Recording":
    """Takes the fields out of a dict that may hold more."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: data[name] for name in names})


def room(
  model: LanguageModel, turns: Sequence[Sequence[int]], max_new_tokens: int
) -> int:
  """Positions that a cache needs at most for turns and their answers."""
  total = sum(map(len, turns)) + len(turns) * max_new_tokens
  # The padding of a pass may reach past the end of the conversation.
  padding = bucket(max(map(len, turns)) + 1)
  return min(total, model.config.max_positions) + padding


def record(
  baseline: LanguageModel,
  conversation: Conversation,
  *,
  max_new_tokens: int,
  capacity: int,
  on_token: Callable[[], Any] = lambda: None,
) -> Recording:
  """Lets a model answer each turn greedily.

  Args:
    baseline: The full-precision model.
    conversation: What it is told.
    max_new_tokens: Tokens of an answer at most; fewer where the context must
      still hold the turns and answers that follow.
    capacity: Positions of the cache, at least `room`.
    on_token: Called after each pass.

  Returns:
    The conversation with its answers.
  """
  turns = encode(baseline, conversation)
  session = Session(baseline, capacity)
  answers: list[list[int]] = []
  step = None
  for index, turn in enumerate(turns):
    step = turn_pass(turn, step, answers[-1] if answers else ())
    limit = min(max_new_tokens, _left(baseline, turns, index, step))
    answer: list[int] = []
    while True:
      output = session.run(step)
      on_token()
      answer.append(int(np.argmax(output.log_probabilities)))
      if answer[-1] in baseline.eos_ids or len(answer) == limit:
        break
      step = decode_pass(answer[-1], step)
    answers.append(answer)
  return Recording(name=conversation.name, turns=turns, answers=answers)


def _left(model, turns, index, step):
  """An equal share of what the context leaves to the answers to come."""
  used = step.start + len(step.tokens)
  later = turns[index + 1 :]
  free = model.config.max_positions - used - sum(map(len, later))
  return max(1, free // (len(later) + 1))
