"""Text to tokens and back, with the checkpoint's own chat template."""

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PromptError

_REPLACEMENT = "\ufffd"


class StreamDecoder:
  """Turns tokens into text as they come, whole characters only.

  The pieces of `push` and the end of `flush` add up to the text of all tokens
  decoded at once.

  Args:
    decode: Text of a sequence of tokens.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str]):
    self._decode = decode
    # Only a window of tokens is decoded again for each new one. It starts at
    # the chunk before the one that is coming, as some tokenizers treat the
    # first token of a text differently.
    self._window: list[int] = []
    self._chunk_start = 0
    self._sent = 0

  def push(self, token: int) -> str:
    """Text that became certain with this token."""
    self._window.append(token)
    text = self._decode(self._window)
    # Bytes that a later token may complete decode to replacements at the end.
    certain = text.rstrip(_REPLACEMENT)
    piece = certain[self._sent :]
    if piece and len(certain) == len(text):
      self._window = self._window[self._chunk_start :]
      self._chunk_start = len(self._window)
      self._sent = len(self._decode(self._window))
    else:
      self._sent += len(piece)
    return piece

  def flush(self) -> str:
    """What is left, incomplete characters included."""
    text = self._decode(self._window)
    piece = text[self._sent :]
    self._sent = len(text)
    return piece


class Tokenizer:
  """A Hugging Face `tokenizer.json` with its chat template.

  Attributes:
    eos_ids: Tokens that end an answer.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer | None,
    *,
    special: Mapping[str, str],
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
  def from_dir(cls, path: str | os.PathLike[str]) -> "Tokenizer":
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
    special = _special_tokens(config)
    generation = _read(path / "generation_config.json")
    return cls(
      backend,
      special=special,
      eos_ids=_eos_ids(path, backend, special, generation),
      chat_template=_chat_template(path, config),
      add_bos=config.get("add_bos_token") is True,
    )

  def _need(self) -> tokenizers.Tokenizer:
    if self._backend is None:
      raise PromptError(
        "the checkpoint has no tokenizer.json; give prompts as token ids"
      )
    return self._backend

  @property
  def vocab_size(self) -> int:
    """Tokens that it knows, special ones included; 0 without a tokenizer."""
    return self._backend.get_vocab_size() if self._backend else 0

  @property
  def has_chat_template(self) -> bool:
    """Whether conversations can be encoded."""
    return self._chat_template is not None

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Args:
      text: Any text; the names of special tokens in it become those tokens.
      add_special_tokens: Whether to add what the tokenizer puts around a
        text, such as a BOS.

    Raises:
      PromptError: The checkpoint has no tokenizer, or the text is not Unicode.
    """
    backend = self._need()
    try:
      text.encode()
    except UnicodeEncodeError as error:
      # Python makes such characters of bytes that are not UTF-8.
      raise PromptError(
        f"the text is not valid Unicode at character {error.start}"
        f" ({text[error.start]!a})"
      ) from None
    ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
    bos = self._special.get("bos_token")
    if add_special_tokens and self._add_bos and bos is not None:
      bos_id = backend.token_to_id(bos)
      if bos_id is not None and ids[:1] != [bos_id]:
        ids = [bos_id, *ids]
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out; "" without a tokenizer."""
    if self._backend is None:
      return ""
    return self._backend.decode(list(ids), skip_special_tokens=True)

  def stream_decoder(self) -> StreamDecoder:
    """A decoder for one request's tokens."""
    return StreamDecoder(self.decode)

  def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    Raises:
      PromptError: As `apply_chat_template`, or there is no tokenizer.
    """
    text = self.apply_chat_template(messages)
    return self.encode(text, add_special_tokens=False)

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
  ) -> str:
    """Renders messages by the checkpoint's template, in a sandbox.

    Args:
      messages: Each with `role` and `content`.
      add_generation_prompt: Whether to end with the head of an answer.

    Raises:
      PromptError: There is no template, or it refuses the messages.
    """
    if self._chat_template is None:
      raise PromptError("the checkpoint has no chat template; use raw text")
    try:
      template = _environment().from_string(self._chat_template)
      return template.render(
        messages=list(messages),
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **self._special,
      )
    except Exception as error:  # A template can raise whatever Python can.
      raise PromptError(f"the chat template failed: {error}") from error


def _environment() -> jinja2.Environment:
  """What Hugging Face offers to templates, and no more."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols"],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _refuse
  environment.globals["strftime_now"] = _strftime_now
  return environment


def _refuse(message):
  raise jinja2.TemplateError(message)


def _strftime_now(pattern):
  return datetime.datetime.now().strftime(pattern)


def _to_json(
  value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  # Unlike jinja2's own filter, does not escape for HTML.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _read(path: Path) -> dict[str, Any]:
  if not path.exists():
    return {}
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{path} cannot be read: {error}") from error
  if not isinstance(data, dict):
    raise CheckpointError(f"{path} does not hold a JSON object")
  return data


def _special_tokens(config) -> dict[str, str]:
  """`bos_token`, `eos_token` and the like, which may be text or objects."""
  tokens = {}
  for key, value in config.items():
    if isinstance(value, dict):
      value = value.get("content")
    if key.endswith("_token") and isinstance(value, str):
      tokens[key] = value
  return tokens


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


def _eos_ids(path, backend, special, generation) -> tuple[int, ...]:
  ids = generation.get("eos_token_id")
  ids = list(ids) if isinstance(ids, list) else [ids]
  if backend is not None and "eos_token" in special:
    ids.append(backend.token_to_id(special["eos_token"]))
  ids = {i for i in ids if i is not None}
  if not all(isinstance(i, int) for i in ids):
    raise CheckpointError(
      f"{path / 'generation_config.json'}: eos_token_id={sorted(ids, key=str)}"
      " must be integers"
    )
  return tuple(sorted(ids))
