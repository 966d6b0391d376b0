"""Prompts of every kind as token ids."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from autoematic_jax.errors import PromptError
from autoematic_jax.language_model import LanguageModel

Messages = Sequence[dict[str, Any]]
Prompt = str | Sequence[int] | Messages


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
  """One prompt or several, as a list."""
  if isinstance(prompts, str):
    return [prompts]
  items: list[Any] = list(prompts)
  if items and isinstance(items[0], int | np.integer | dict):
    return [items]
  return items


def encode_prompt(
  model: LanguageModel, prompt: Prompt, *, chat: bool
) -> list[int]:
  """Token ids of a prompt, checked against the vocabulary and the context.

  Raises:
    PromptError: The prompt is empty, holds an unknown id, or leaves no room
      for a new token.
  """
  if isinstance(prompt, str) and chat:
    prompt = [{"role": "user", "content": prompt}]
  if isinstance(prompt, str):
    ids = model.tokenizer.encode(prompt)
  elif prompt and isinstance(prompt[0], dict):
    ids = model.tokenizer.encode_chat(cast(Messages, prompt))
  else:
    ids = [int(token) for token in cast(Sequence[int], prompt)]
  if not ids:
    raise PromptError("a prompt is empty: it has no tokens")
  vocab = model.config.vocab_size
  outside = [token for token in ids if not 0 <= token < vocab]
  if outside:
    raise PromptError(
      f"token id {outside[0]} is outside the vocabulary of {vocab}"
    )
  if len(ids) >= model.config.max_positions:
    raise PromptError(
      f"a prompt has {len(ids)} tokens; the model's context is"
      f" {model.config.max_positions}, the answer included"
    )
  return ids
