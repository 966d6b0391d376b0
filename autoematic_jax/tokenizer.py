"""Text to tokens and back, with the checkpoint's own chat template."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PromptError

_REPLACEMENT = "\ufffd"


class StreamDecoder:
  """Turns tokens into text as they come, whole characters only."""

  def __init__(self, decode):
    self._decode = decode
    self._tokens: list[int] = []
    self._done = ""

  def push(self, token: int) -> str:
    """Text that became certain with this token."""
    self._tokens.append(token)
    text = self._decode(self._tokens)
    if text.endswith(_REPLACEMENT):
      return ""
    return self._take(text)

  def flush(self) -> str:
    """What is left, incomplete characters included."""
    return self._take(self._decode(self._tokens))

  def _take(self, text):
    new = text[len(self._done) :]
    self._done = text
    return new


class Tokenizer:
  """A Hugging Face `tokenizer.json` with its chat template.

  Attributes:
    eos_ids: Tokens that end an answer.
  """

  def __init__(
      self,
      backend: tokenizers.Tokenizer | None,
      *,
      special: dict[str, str],
      eos_ids: tuple[int, ...],
      chat_template: str | None,
      add_bos: bool,
  ):
    self._backend = backend
    self._special = special
    self._chat_template = chat_template
    self._add_bos = add_bos
    self.eos_ids = eos_ids

  @classmethod
  def from_dir(cls, path: str | Path) -> "Tokenizer":
    """Reads tokenizer, template and end tokens from a folder.

    A folder without `tokenizer.json` gives a tokenizer that knows its end
    tokens only; prompts must then be token ids.

    Raises:
      CheckpointError: A file is damaged.
    """
    path = Path(path)
    backend = None
    file = path / "tokenizer.json"
    if file.exists():
      try:
        backend = tokenizers.Tokenizer.from_file(str(file))
      except Exception as error:  # The Rust side raises bare Exception.
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    config = _read(path / "tokenizer_config.json")
    generation = _read(path / "generation_config.json")
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and value
    }
    return cls(
        backend,
        special=special,
        eos_ids=_eos_ids(backend, special, generation),
        chat_template=_chat_template(path, config),
        add_bos=bool(config.get("add_bos_token", False)),
    )

  def _need(self) -> tokenizers.Tokenizer:
    if self._backend is None:
      raise PromptError(
          "the checkpoint has no tokenizer.json; give prompts as token ids"
      )
    return self._backend

  def encode(self, text: str) -> list[int]:
    """Token ids of a text, with whatever the tokenizer adds at its start.

    Raises:
      PromptError: The checkpoint has no tokenizer.
    """
    ids = self._need().encode(text).ids
    bos = self._special.get("bos_token")
    if self._add_bos and bos is not None:
      bos_id = self._need().token_to_id(bos)
      if bos_id is not None and ids[:1] != [bos_id]:
        ids = [bos_id, *ids]
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out."""
    if self._backend is None:
      return ""
    return self._backend.decode(list(ids), skip_special_tokens=True)

  def stream_decoder(self) -> StreamDecoder:
    """A decoder for one request's tokens."""
    return StreamDecoder(self.decode)

  def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer."""
    text = self.apply_chat_template(messages)
    return self._need().encode(text, add_special_tokens=False).ids

  def apply_chat_template(
      self,
      messages: Sequence[dict[str, Any]],
      *,
      add_generation_prompt: bool = True,
  ) -> str:
    """Renders messages by the checkpoint's template, in a sandbox.

    Raises:
      PromptError: There is no template, or it refuses the messages.
    """
    if self._chat_template is None:
      raise PromptError("the checkpoint has no chat template; use raw text")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    try:
      return environment.from_string(self._chat_template).render(
          messages=list(messages),
          add_generation_prompt=add_generation_prompt,
          **self._special,
      )
    except (jinja2.TemplateError, TypeError, AttributeError) as error:
      raise PromptError(f"the chat template failed: {error}") from error


def _refuse(message):
  raise jinja2.TemplateError(message)


def _strftime_now(pattern):
  return datetime.datetime.now().strftime(pattern)


def _to_json(value, indent=None):
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _read(path: Path) -> dict[str, Any]:
  if not path.exists():
    return {}
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{path} cannot be read: {error}") from error
  return data if isinstance(data, dict) else {}


def _chat_template(path, config):
  file = path / "chat_template.jinja"
  if file.exists():
    return file.read_text(encoding="utf-8")
  template = _read(path / "chat_template.json").get("chat_template")
  template = template or config.get("chat_template")
  if isinstance(template, list):
    named = {entry["name"]: entry["template"] for entry in template}
    template = named.get("default")
  return template


def _eos_ids(backend, special, generation):
  ids = generation.get("eos_token_id", [])
  ids = list(ids) if isinstance(ids, list) else [ids]
  if backend is not None and special.get("eos_token"):
    ids.append(backend.token_to_id(special["eos_token"]))
  return tuple(sorted({int(i) for i in ids if i is not None}))
