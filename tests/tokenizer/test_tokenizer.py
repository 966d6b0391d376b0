import json

import pytest
import tokenizers
from hypothesis import example
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PromptError
from autoematic_jax.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "Naïve café: 日本語, Ελληνικά, 🙂🙃 and 12345\n\tfor all."
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def backend():
  """A byte-level BPE that splits characters over tokens."""
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    min_frequency=1,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=SPECIAL,
    show_progress=False,
  )
  bpe.train_from_iterator([TEXT], trainer)
  return bpe


@pytest.fixture(scope="module")
def tokenizer(backend, tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizer")
  backend.save(str(folder / "tokenizer.json"))
  return Tokenizer.from_dir(folder)


@pytest.fixture
def folder(backend, tmp_path):
  backend.save(str(tmp_path / "tokenizer.json"))

  def write(template=None, generation=None, **config):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
      (tmp_path / "chat_template.jinja").write_text(template)
    if generation is not None:
      file = tmp_path / "generation_config.json"
      file.write_text(json.dumps(generation))
    return tmp_path

  return write


@given(st.text())
def test_any_text_survives(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 299)))
@example([3, 200, 200, 3])
def test_streamed_pieces_add_up_to_the_whole(tokenizer, ids):
  stream = tokenizer.stream_decoder()
  pieces = [stream.push(token) for token in ids]
  assert "".join([*pieces, stream.flush()]) == tokenizer.decode(ids)
  assert stream.flush() == ""


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")))
def test_valid_text_streams_without_replacement_characters(tokenizer, text):
  stream = tokenizer.stream_decoder()
  shown = ""
  for token in tokenizer.encode(text):
    shown += stream.push(token)
    assert text.startswith(shown)
  assert shown == text


def test_a_character_appears_with_its_last_byte(tokenizer):
  ids = tokenizer.encode("a𐌰b")
  assert len(ids) == 6
  stream = tokenizer.stream_decoder()
  pieces = [stream.push(token) for token in ids]
  assert pieces == ["a", "", "", "", "𐌰", "b"]


def test_an_incomplete_character_shows_at_the_end(tokenizer):
  stream = tokenizer.stream_decoder()
  assert stream.push(tokenizer.encode("🦊")[0]) == ""
  assert stream.flush() == "\ufffd"


def test_a_stream_decodes_a_bounded_window(tokenizer):
  """So that a long answer costs no more for each token than a short one."""
  longest = 0

  def decode(ids):
    nonlocal longest
    longest = max(longest, len(ids))
    return tokenizer.decode(ids)

  stream = type(tokenizer.stream_decoder())(decode)
  for token in tokenizer.encode(TEXT * 20):
    stream.push(token)
  assert longest < 16


def test_special_tokens_in_text_are_tokens_and_are_left_out_of_text(tokenizer):
  ids = tokenizer.encode("<|im_start|>Hi<|im_end|>")
  assert ids[0] == 1
  assert ids[-1] == 2
  assert tokenizer.decode(ids) == "Hi"


def test_text_that_is_not_unicode_is_refused(tokenizer):
  """Such as an argument that was not UTF-8."""
  text = b"ab\xff".decode(errors="surrogateescape")
  with pytest.raises(PromptError, match=r"character 2 \('\\udcff'\)"):
    tokenizer.encode(text)


def test_a_bos_is_added_once(folder, tmp_path, backend):
  folder(bos_token="<|im_start|>", add_bos_token=True)
  tokenizer = Tokenizer.from_dir(tmp_path)
  plain = backend.encode("Hi").ids
  assert tokenizer.encode("Hi") == [1, *plain]
  assert tokenizer.encode("<|im_start|>Hi") == [1, *plain]
  assert tokenizer.encode("Hi", add_special_tokens=False) == plain


def test_no_bos_where_none_is_asked_for(folder, backend):
  tokenizer = Tokenizer.from_dir(folder(bos_token="<|im_start|>"))
  assert tokenizer.encode("Hi") == backend.encode("Hi").ids


def test_end_tokens_are_those_of_both_files(folder):
  path = folder(
    generation={"eos_token_id": [0]}, eos_token={"content": "<|im_end|>"}
  )
  assert Tokenizer.from_dir(path).eos_ids == (0, 2)


@pytest.mark.parametrize("stored", [None, 2, [2]])
def test_end_tokens_may_be_none_one_or_many(folder, stored):
  path = folder(generation={"eos_token_id": stored})
  wanted = () if stored is None else (2,)
  assert Tokenizer.from_dir(path).eos_ids == wanted


CHATML = (
  "{% for m in messages %}\n"
  "  {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
  "{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}\n"
  "{% endfor %}\n"
  "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_chat_is_rendered_by_the_template(folder):
  path = folder(CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>")
  tokenizer = Tokenizer.from_dir(path)
  messages = [*MESSAGES, {"role": "tool", "content": "x"}]
  text = tokenizer.apply_chat_template(messages)
  assert text == "<|im_start|>user: Hi<|im_end|>\nassistant: "
  ids = tokenizer.encode_chat(messages)
  assert ids == tokenizer.encode(text, add_special_tokens=False)
  assert ids[0] == 1
  without = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
  assert without == "<|im_start|>user: Hi<|im_end|>\n"


@pytest.mark.parametrize(
  "stored",
  [
    "Hi",
    [
      {"name": "tool_use", "template": "no"},
      {"name": "default", "template": "Hi"},
    ],
  ],
)
def test_a_template_may_be_in_the_config(folder, stored):
  tokenizer = Tokenizer.from_dir(folder(chat_template=stored))
  assert tokenizer.apply_chat_template(MESSAGES) == "Hi"


def test_templates_have_what_hugging_face_gives_them(folder):
  template = (
    "{{ messages[0] | tojson }}|{{ [1] | tojson(indent=1) }}"
    "|{{ strftime_now('%%') }}|{{ tools is none }}"
  )
  messages = [{"role": "user", "content": "<é>'"}]
  text = Tokenizer.from_dir(folder(template)).apply_chat_template(messages)
  assert text == ('{"role": "user", "content": "<é>\'"}|[\n 1\n]|%|True')


@pytest.mark.parametrize(
  "template",
  [
    "{{ raise_exception('roles must alternate') }}",
    "{% if %}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content.__init__.__globals__ }}",
    "{{ messages[0]['nothing']['more'] }}",
    "{{ 1 / 0 }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ messages + 1 }}",
  ],
)
def test_a_template_that_fails_or_breaks_out_is_a_prompt_error(
  folder, template
):
  tokenizer = Tokenizer.from_dir(folder(template))
  with pytest.raises(PromptError, match="chat template failed"):
    tokenizer.apply_chat_template(MESSAGES)


def test_the_template_says_why_it_refuses(folder):
  path = folder("{{ raise_exception('roles must alternate') }}")
  with pytest.raises(PromptError, match="roles must alternate"):
    Tokenizer.from_dir(path).apply_chat_template(MESSAGES)


def test_without_a_template_chats_are_refused(tokenizer):
  with pytest.raises(PromptError, match="no chat template"):
    tokenizer.encode_chat(MESSAGES)


def test_without_a_tokenizer_only_ids_are_left(tmp_path):
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
  tokenizer = Tokenizer.from_dir(tmp_path)
  assert tokenizer.eos_ids == (5,)
  assert tokenizer.decode([1, 2]) == ""
  assert tokenizer.stream_decoder().push(1) == ""
  with pytest.raises(PromptError, match="token ids"):
    tokenizer.encode("Hi")


@pytest.mark.parametrize(
  ("file", "content"),
  [
    ("tokenizer.json", "{}"),
    ("tokenizer_config.json", "{"),
    ("generation_config.json", "[]"),
    ("generation_config.json", '{"eos_token_id": "two"}'),
  ],
)
def test_a_damaged_file_is_named(folder, file, content):
  path = folder()
  (path / file).write_text(content)
  with pytest.raises(CheckpointError, match=file):
    Tokenizer.from_dir(path)
