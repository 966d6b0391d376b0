"""Conversations: what a model is told, turn by turn, between its answers.

In a file, a line is an object whose `turns` are the turns in order. A turn is
a text, which the model reads as it is, or a list of messages with `role` and
`content`, which go through the chat template; one conversation keeps to one of
the two. Answers are left out, as the model writes them.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import PromptError
from autoematic_jax.evaluation.tasks import sources
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.models.reference import problem_file
from autoematic_jax.prompts import encode_prompt

Message = dict[str, str]
Turn = str | tuple[Message, ...]

TASKS = ("reference", "chat")
"""Conversations that come with the project."""

_CHAT = Path(__file__).with_name("chat.jsonl")

_ANSWER = "\u241e answer \u241e"
"""Stands for an answer while a template renders what follows it."""

_IN_A_ROW = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """The turns between which a model answers.

  Attributes:
    name: Names it in reports and errors.
    turns: Texts, or messages for the chat template.
  """

  name: str
  turns: tuple[Turn, ...]


def load_task(name: str) -> list[Conversation]:
  """Conversations that come with the project.

  Args:
    name: `reference`, the held-out problems of the reference model, by turns
      one alone and three in a row; or `chat`, small talk and results of tools
      for models with a chat template.
  """
  if name == "chat":
    return load_file(_CHAT)
  lines = sources.read(problem_file.SHIPPED)
  conversations = []
  while lines:
    count = _IN_A_ROW if len(conversations) % 2 else 1
    taken, lines = lines[:count], lines[count:]
    numbers = dict.fromkeys((taken[0].number, taken[-1].number))
    conversations.append(
      Conversation(
        name=f"problem {'-'.join(map(str, numbers))}",
        turns=tuple(_user(line.text("prompt")) for line in taken),
      )
    )
  return conversations


def _user(text):
  return ({"role": "user", "content": text},)


def load_file(path: Path) -> list[Conversation]:
  """Conversations of a file.

  Raises:
    AutoematicError: The file cannot be read or a line is not as it should be.
  """
  return [
    Conversation(name=line.place, turns=_turns(line))
    for line in sources.read(path)
  ]


def _turns(line) -> tuple[Turn, ...]:
  turns = line.fields.get("turns")
  if not isinstance(turns, list) or not turns:
    raise line.error("'turns' must be a list of at least one turn")
  if all(isinstance(turn, str) for turn in turns):
    if not all(turns):
      raise line.error("a turn is an empty text")
    return tuple(turns)
  return tuple(_messages(line, number, t) for number, t in enumerate(turns, 1))


def _messages(line, number, turn):
  if not isinstance(turn, list) or not turn:
    raise line.error(
      f"turn {number} must be a list of messages; either all turns are texts or"
      " none is"
    )
  for message in turn:
    parts = message if isinstance(message, dict) else {}
    texts = [parts.get("role"), parts.get("content")]
    if not all(isinstance(text, str) for text in texts):
      raise line.error(
        f"turn {number}: a message needs the texts role, content"
      )
    if texts[0] == "assistant":
      raise line.error(
        f"turn {number} holds an answer (role assistant); the model writes it"
      )
  return tuple(turn)


def identity(conversations: Sequence[Conversation]) -> dict[str, Any]:
  """Number and hash of conversations, for a report."""
  data = json.dumps([dataclasses.asdict(item) for item in conversations])
  digest = hashlib.sha256(data.encode()).hexdigest()
  return {"count": len(conversations), "sha256": digest}


def encode(model: LanguageModel, conversation: Conversation) -> list[list[int]]:
  """Token ids of each turn, the answers left out.

  A turn after the first begins with what the chat template puts behind an
  answer.

  Raises:
    AutoematicError: The model has no chat template or it refuses a message,
      or the turns leave no room for answers in the model's context.
  """
  try:
    turns = _encode(model, conversation.turns)
  except PromptError as error:
    raise AutoematicError(f"{conversation.name}: {error}") from error
  read, context = sum(map(len, turns)), model.config.max_positions
  if read + len(turns) > context:
    raise AutoematicError(
      f"{conversation.name}: {read} tokens in {len(turns)} turns leave no room"
      f" for answers in the model's context of {context}"
    )
  return turns


def _encode(model, turns):
  encoded, messages = [], []
  for turn in turns:
    if not encoded:
      prompt = turn if isinstance(turn, str) else list(turn)
      encoded.append(encode_prompt(model, prompt, chat=False))
    else:
      text = turn if isinstance(turn, str) else _rendered(model, messages, turn)
      ids = model.tokenizer.encode(text, add_special_tokens=False)
      encoded.append(ids)
    if not isinstance(turn, str):
      messages += [*turn, {"role": "assistant", "content": _ANSWER}]
  return encoded


def _rendered(model, messages, turn):
  """What the template writes between the last answer and the next."""
  text = model.tokenizer.apply_chat_template([*messages, *turn])
  if _ANSWER not in text:
    raise PromptError("the chat template leaves out answers of earlier turns")
  return text.rpartition(_ANSWER)[2]
