"""Rebuilds a Hugging Face tokenizer from GGUF metadata (byte-level BPE)."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken
from tokenizers import Regex
from tokenizers import Tokenizer
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from autoematic_jax.errors import UnsupportedModelError

_CONTROL = 3
_USER_DEFINED = 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2():
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm():
  return pre_tokenizers.Sequence(
      [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
  )


def _llama3():
  return pre_tokenizers.Sequence([
      pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])


_PRE_TOKENIZERS = {
    "gpt-2": (_gpt2, False),
    "smollm": (_smollm, False),
    "llama-bpe": (_llama3, True),
}
"""How text is split, and whether whole words skip the merges."""


def tokenizer_files(
    field: Callable[..., Any], source: str
) -> dict[str, bytes]:
  """Tokenizer files from GGUF metadata.

  Args:
    field: Looks a metadata key up, with an optional default.
    source: Name of the file, for messages.

  Returns:
    `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and,
    where there is one, `chat_template.jinja`.

  Raises:
    UnsupportedModelError: Names a tokenizer model or split not handled.
  """
  model, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
  if model != "gpt2":
    raise UnsupportedModelError(
        f"{source}: tokenizer model {model!r} is not handled; handled: gpt2"
    )
  if pre not in _PRE_TOKENIZERS:
    raise UnsupportedModelError(
        f"{source}: tokenizer split {pre!r} is not handled; handled:"
        f" {', '.join(_PRE_TOKENIZERS)}"
    )
  tokens = list(field("tokenizer.ggml.tokens"))
  special = {
      key: field(f"tokenizer.ggml.{key}_token_id")
      for key in ("bos", "eos", "unknown", "padding")
  }
  files = {
      "tokenizer.json": _tokenizer(field, tokens, pre).to_str().encode(),
      "tokenizer_config.json": _json({
          f"{name}_token": tokens[special[key]]
          for key, name in (
              ("bos", "bos"),
              ("eos", "eos"),
              ("unknown", "unk"),
              ("padding", "pad"),
          )
          if special[key] is not None
      }
      | {"add_bos_token": bool(field("tokenizer.ggml.add_bos_token", False))}),
      "generation_config.json": _json({
          f"{key}_token_id": int(special[key])
          for key in ("bos", "eos")
          if special[key] is not None
      }),
  }
  template = field("tokenizer.chat_template")
  if template:
    files["chat_template.jinja"] = template.encode()
  return files


def _json(data):
  return json.dumps(data, indent=2).encode()


def _tokenizer(field, tokens, pre):
  split, ignore_merges = _PRE_TOKENIZERS[pre]
  merges = [
      tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")
  ]
  tokenizer = Tokenizer(
      models.BPE(
          vocab={token: index for index, token in enumerate(tokens)},
          merges=merges,
          ignore_merges=ignore_merges,
      )
  )
  tokenizer.pre_tokenizer = split()
  tokenizer.decoder = decoders.ByteLevel()
  types = field("tokenizer.ggml.token_type") or []
  marked = list(zip(tokens, types, strict=False))
  tokenizer.add_special_tokens([
      AddedToken(token, special=True, normalized=False)
      for token, kind in marked
      if kind == _CONTROL
  ])
  tokenizer.add_tokens([
      AddedToken(token, normalized=False)
      for token, kind in marked
      if kind == _USER_DEFINED
  ])
  return tokenizer
