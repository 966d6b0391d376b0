"""Answers in OpenAI's form, whole and in chunks."""

import json
import time
import uuid
from typing import Any

from autoematic_jax.serving.protocol import Kind
from autoematic_jax.serving.sequences import Output
from autoematic_jax.serving.sequences import TokenLogprobs
from autoematic_jax.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

_OBJECTS = {
  ("completion", False): "text_completion",
  ("completion", True): "text_completion",
  ("chat", False): "chat.completion",
  ("chat", True): "chat.completion.chunk",
}


def frame(data: dict[str, Any]) -> bytes:
  """One server-sent event."""
  return b"data: " + json.dumps(data).encode() + b"\n\n"


class Formatter:
  """The answer to one request, whose id all its chunks share."""

  def __init__(self, kind: Kind, model: str, tokenizer: Tokenizer):
    self.kind = kind
    self._model = model
    self._tokenizer = tokenizer
    prefix = "chatcmpl" if kind == "chat" else "cmpl"
    self._id = f"{prefix}-{uuid.uuid4().hex}"
    self._created = int(time.time())
    self._offsets: dict[int, int] = {}

  def _envelope(self, choices, *, stream):
    return {
      "id": self._id,
      "object": _OBJECTS[self.kind, stream],
      "created": self._created,
      "model": self._model,
      "choices": choices,
    }

  def role_chunk(self, index: int) -> bytes:
    """The first chunk of a choice of a chat."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": index, "delta": delta, "finish_reason": None}
    return frame(self._envelope([choice], stream=True))

  def chunk(self, index: int, output: Output) -> bytes:
    """A choice's new text, with what ended it, if it did."""
    if self.kind == "chat":
      delta = {"content": output.text} if output.text else {}
      choice: dict[str, Any] = {"index": index, "delta": delta}
    else:
      choice = {"index": index, "text": output.text}
    choice["finish_reason"] = output.finish_reason
    choice["logprobs"] = self._logprobs(index, output.logprobs)
    return frame(self._envelope([choice], stream=True))

  def usage_chunk(self, usage: dict[str, Any]) -> bytes:
    """The last chunk, where it was asked for."""
    return frame({**self._envelope([], stream=True), "usage": usage})

  def whole(
    self, outputs: list[Output], usage: dict[str, Any]
  ) -> dict[str, Any]:
    """All choices at once."""
    choices = []
    for index, output in enumerate(outputs):
      choice: dict[str, Any] = {
        "index": index,
        "finish_reason": output.finish_reason,
        "logprobs": self._logprobs(index, output.logprobs),
      }
      if self.kind == "chat":
        message = {"role": "assistant", "content": output.text}
        choices.append({**choice, "message": message})
      else:
        choices.append({**choice, "text": output.text})
    return {**self._envelope(choices, stream=False), "usage": usage}

  def _logprobs(self, index, entries):
    if not entries:
      return None
    if self.kind == "chat":
      return {"content": [self._chat_entry(entry) for entry in entries]}
    return self._completion_entries(index, entries)

  def _chat_entry(self, entry: TokenLogprobs):
    return {
      **self._named(entry.token, entry.logprob),
      "top_logprobs": [self._named(*top) for top in entry.top],
    }

  def _named(self, token, logprob):
    text = self._tokenizer.decode([token])
    return {
      "token": text,
      "logprob": logprob,
      "bytes": list(text.encode()),
    }

  def _completion_entries(self, index, entries):
    offset = self._offsets.get(index, 0)
    tokens, offsets = [], []
    for entry in entries:
      tokens.append(self._tokenizer.decode([entry.token]))
      offsets.append(offset)
      offset += len(tokens[-1])
    self._offsets[index] = offset
    return {
      "tokens": tokens,
      "token_logprobs": [entry.logprob for entry in entries],
      "top_logprobs": [
        {self._tokenizer.decode([t]): p for t, p in entry.top}
        if entry.logprob is not None
        else None
        for entry in entries
      ],
      "text_offset": offsets,
    }


def joined(outputs: list[Output]) -> Output:
  """What a choice's outputs are together."""
  return Output(
    text="".join(output.text for output in outputs),
    tokens=tuple(t for output in outputs for t in output.tokens),
    logprobs=tuple(p for output in outputs for p in output.logprobs),
    finish_reason=outputs[-1].finish_reason,
    cached_tokens=outputs[-1].cached_tokens,
  )


def usage(prompts: list[int], generated: int, cached: int) -> dict[str, Any]:
  """Tokens of a request; each prompt counts once, whatever `n` is."""
  return {
    "prompt_tokens": sum(prompts),
    "completion_tokens": generated,
    "total_tokens": sum(prompts) + generated,
    "prompt_tokens_details": {"cached_tokens": cached},
  }
