import json

import pytest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from autoematic_jax.checkpoints import open_source
from autoematic_jax.checkpoints.gguf_tokenizer import tokenizer_files
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.tokenizer import Tokenizer

BYTES = 256
SPECIAL = 3


@pytest.fixture(scope="module")
def fields(trained_bpe):
  model = json.loads(trained_bpe.to_str())["model"]
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": sorted(model["vocab"], key=model["vocab"].get),
    "tokenizer.ggml.token_type": [3] * SPECIAL + [1] * (320 - SPECIAL),
    "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
  }


def rebuilt(folder, fields, **changes):
  """The tokenizer as it is read back from a checkpoint's files."""
  changes = {f"tokenizer.ggml.{key}": v for key, v in changes.items()}
  kept = {k: v for k, v in (fields | changes).items() if v is not None}
  for name, content in tokenizer_files(kept, "tiny.gguf").items():
    (folder / name).write_bytes(content)
  return Tokenizer.from_dir(folder)


@pytest.mark.parametrize(
  "pre", ["smollm", "gpt-2", "llama-bpe", "default", None]
)
@given(text=st.text())
@settings(
  max_examples=40,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_text_survives(tmp_path, fields, pre, text):
  tokenizer = rebuilt(tmp_path, fields, pre=pre)
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_give_the_ids_of_the_tokenizer_they_come_from(
  tmp_path, fields, trained_bpe
):
  tokenizer = rebuilt(tmp_path, fields, pre="gpt-2")
  for text in ("The capital of France", "naïve café, 日本語 🙂", "don't   x\n"):
    assert tokenizer.encode(text) == trained_bpe.encode(text).ids


def split(folder, text):
  backend = Backend.from_file(str(folder / "tokenizer.json"))
  pieces = backend.pre_tokenizer.pre_tokenize_str(text)
  return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
  ("pre", "pieces"),
  [
    ("smollm", ["I", "'m", " ", "1", "2", "3", "4", " ok", "!?", "\n\n"]),
    ("gpt-2", ["I", "'m", " 1234", " ok", "!?", "\n\n"]),
    ("llama-bpe", ["I", "'m", " ", "123", "4", " ok", "!?\n\n"]),
    ("default", ["I", "'", "m", " ", "123", "4", " ok", "!?", "\n\n"]),
  ],
)
def test_text_is_split_as_the_file_names_it(tmp_path, fields, pre, pieces):
  rebuilt(tmp_path, fields, pre=pre)
  assert split(tmp_path, "I'm 1234 ok!?\n\n") == pieces


def test_whole_words_skip_the_merges_for_llama_3_only(tmp_path, fields):
  """A word of the vocabulary that no merge leads to."""
  tokens = [*fields["tokenizer.ggml.tokens"], "zqzq"]
  types = [*fields["tokenizer.ggml.token_type"], 1]
  changes = {"tokens": tokens, "token_type": types, "add_bos_token": False}
  llama = rebuilt(tmp_path, fields, pre="llama-bpe", **changes)
  assert llama.encode("zqzq") == [320]
  smollm = rebuilt(tmp_path, fields, pre="smollm", **changes)
  assert len(smollm.encode("zqzq")) == 4


def test_control_tokens_are_special_and_user_defined_ones_are_not(
  tmp_path, fields
):
  types = [3, 3, 4] + [1] * (320 - SPECIAL)
  tokenizer = rebuilt(tmp_path, fields, token_type=types)
  ids = tokenizer.encode("<|im_start|>a<|im_end|>")
  assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
  assert tokenizer.decode(ids) == "a<|im_end|>"


@pytest.mark.parametrize(
  ("pre", "stored", "added"),
  [
    ("smollm", None, False),
    ("smollm", True, True),
    ("llama-bpe", None, True),
    ("llama-bpe", False, False),
  ],
)
def test_a_bos_is_added_where_the_file_or_its_split_says_so(
  tmp_path, fields, pre, stored, added
):
  tokenizer = rebuilt(tmp_path, fields, pre=pre, add_bos_token=stored)
  assert (tokenizer.encode("Hi")[0] == 1) is added
  assert tokenizer.encode("Hi", add_special_tokens=False)[0] != 1
  # The file alone says so too, to whoever else reads it.
  backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
  assert (backend.encode("Hi").ids[0] == 1) is added


@pytest.mark.parametrize(
  ("changes", "ends"),
  [
    ({}, (2,)),
    ({"eos_token_id": 0}, (0, 2)),
    ({"eos_token_id": 0, "eot_token_id": 1}, (0, 1)),
    ({"eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 5}, (0, 1, 5)),
  ],
)
def test_answers_end_with_any_of_the_end_tokens(
  tmp_path, fields, changes, ends
):
  """`<|im_end|>` is one where the file names no end of turn."""
  assert rebuilt(tmp_path, fields, **changes).eos_ids == ends


def test_the_chat_template_travels_along(gguf_file, tmp_path):
  files = open_source(gguf_file()).tokenizer_files()
  assert files["chat_template.jinja"] == b"{{ messages[0].content }}"


@pytest.mark.parametrize(
  ("key", "value"), [("model", "llama"), ("model", None), ("pre", "qwen2")]
)
def test_other_tokenizers_are_named(tmp_path, fields, key, value):
  with pytest.raises(
    UnsupportedModelError,
    match=rf"tiny\.gguf: tokenizer\.ggml\.{key}={value!r}",
  ):
    rebuilt(tmp_path, fields, **{key: value})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tokens": None}, r"lacks the metadata tokenizer\.ggml\.tokens"),
    ({"merges": ["no such"]}, "merges do not fit"),
    ({"merges": ["one"]}, "merges do not fit"),
    ({"eos_token_id": 320}, "eos_token_id=320 is not below the 320 tokens"),
  ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path, fields, changes, message):
  with pytest.raises(CheckpointError, match=message):
    rebuilt(tmp_path, fields, **changes)
