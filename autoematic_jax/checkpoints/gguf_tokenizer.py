"""Rebuilds a Hugging Face tokenizer from GGUF metadata (byte-level BPE)."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Regex
from tokenizers import Tokenizer
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors

from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import UnsupportedModelError

# Kinds of `tokenizer.ggml.token_type`.
_CONTROL = 3
_USER_DEFINED = 4

_GPT2_SPLIT = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
)
_LLAMA3_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Files made before `eot_token_id` was stored end a turn with one of these.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>")


def _splits(*patterns):
  """Splits by each pattern in turn, then maps bytes to characters."""
  return pre_tokenizers.Sequence(
    [
      *(pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def _gpt2():
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm():
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      _gpt2(),
    ]
  )


def _llama3():
  return _splits(_LLAMA3_SPLIT)


def _default():
  return _splits(
    r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"
  )


_PRE_TOKENIZERS = {
  "default": _default,
  "gpt-2": _gpt2,
  "llama-bpe": _llama3,
  "smollm": _smollm,
}


def tokenizer_files(
  metadata: Mapping[str, Any], source: str
) -> dict[str, bytes]:
  """Tokenizer files from GGUF metadata.

  Args:
    metadata: Every key and value of the file.
    source: Name of the file, for messages.

  Returns:
    `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and,
    where there is one, `chat_template.jinja`.

  Raises:
    CheckpointError: The vocabulary or the merges are missing or damaged.
    UnsupportedModelError: Names a tokenizer model or split not handled.
  """
  fields = {
    key.removeprefix("tokenizer.ggml."): value
    for key, value in metadata.items()
  }
  pre = fields.get("pre", "default")
  for key, value, handled in (
    ("model", fields.get("model"), ("gpt2",)),
    ("pre", pre, tuple(_PRE_TOKENIZERS)),
  ):
    if value not in handled:
      raise UnsupportedModelError(
        f"{source}: tokenizer.ggml.{key}={value!r} is not handled; handled:"
        f" {', '.join(handled)}"
      )
  for key in ("tokens", "merges", "token_type"):
    if not isinstance(fields.get(key), list):
      raise CheckpointError(f"{source} lacks the metadata tokenizer.ggml.{key}")
  special = _special_ids(fields, source)
  # Llama 3's files need not say so: a leading BOS comes with its split.
  add_bos = bool(fields.get("add_bos_token", pre == "llama-bpe"))
  files = {
    "tokenizer.json": _tokenizer(fields, pre, special, add_bos, source),
    "tokenizer_config.json": _config(fields, special, add_bos),
    "generation_config.json": _generation(fields, special),
  }
  template = metadata.get("tokenizer.chat_template")
  if template:
    files["chat_template.jinja"] = template.encode()
  return files


def _special_ids(fields, source) -> dict[str, int]:
  """Token id of each special role that the file names."""
  roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
  roles |= {"eot": "eot", "eom": "eom"}
  ids = {}
  for role, name in roles.items():
    token = fields.get(f"{role}_token_id")
    if token is None:
      continue
    if not 0 <= token < len(fields["tokens"]):
      raise CheckpointError(
        f"{source}: tokenizer.ggml.{role}_token_id={token} is not below the"
        f" {len(fields['tokens'])} tokens"
      )
    ids[name] = int(token)
  return ids


def _config(fields, special, add_bos):
  tokens = {
    f"{name}_token": fields["tokens"][special[name]]
    for name in ("bos", "eos", "unk", "pad")
    if name in special
  }
  return _json(
    {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "add_bos_token": add_bos,
      "clean_up_tokenization_spaces": False,
      **tokens,
    }
  )


def _generation(fields, special):
  ends = {special[name] for name in ("eos", "eot", "eom") if name in special}
  if "eot" not in special:
    ends |= {
      fields["tokens"].index(name)
      for name in _TURN_ENDS
      if name in fields["tokens"]
    }
  ids = {f"{n}_token_id": special[n] for n in ("bos", "pad") if n in special}
  return _json({**ids, "eos_token_id": sorted(ends)})


def _json(data) -> bytes:
  return json.dumps(data, indent=2).encode()


def _tokenizer(fields, pre, special, add_bos, source) -> bytes:
  """The content of `tokenizer.json`."""
  tokens = fields["tokens"]
  try:
    tokenizer = Tokenizer(
      models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in fields["merges"]],
        ignore_merges=pre == "llama-bpe",
      )
    )
  except Exception as error:  # The Rust side raises bare Exception.
    raise CheckpointError(
      f"{source}: the tokenizer's merges do not fit its vocabulary: {error}"
    ) from error
  tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  tokenizer.decoder = decoders.ByteLevel()
  if add_bos and "bos" in special:
    bos = tokens[special["bos"]]
    tokenizer.post_processor = processors.TemplateProcessing(
      single=[bos, "$A"],
      pair=[bos, "$A", f"{bos}:1", "$B:1"],
      special_tokens=[(bos, special["bos"])],
    )
  for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
    tokenizer.add_tokens(
      [
        AddedToken(token, special=is_special, normalized=False)
        for token, its_kind in zip(tokens, fields["token_type"], strict=False)
        if its_kind == kind
      ]
    )
  return tokenizer.to_str().encode()
