import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.models.reference import words
from autoematic_jax.tokenizer import Tokenizer

MESSAGES = [
  {"role": "user", "content": "What is 12 + 345?"},
  {"role": "assistant", "content": "Answer: 357"},
  {"role": "user", "content": "And 1 + 1?"},
]


def test_sizes_and_special_tokens(tokenizer):
  assert tokenizer.get_vocab_size() == vocabulary.SIZE
  ids = [tokenizer.token_to_id(token) for token in vocabulary.SPECIAL]
  assert ids == [0, 1, 2, 3]


def test_every_digit_is_a_token(tokenizer):
  assert tokenizer.encode("x=2024, 17").tokens[-7:-3] == ["0", "2", "4", ","]
  digits = [
    t for t in tokenizer.get_vocab() if any(c in "0123456789" for c in t)
  ]
  assert sorted(digits) == list("0123456789")


def test_every_word_after_a_space_is_a_token(tokenizer):
  for word in words.WORDS:
    assert len(tokenizer.encode(f" {word}").ids) == 1


@given(st.text())
def test_text_comes_back(text):
  tokenizer = vocabulary.load()
  ids = tokenizer.encode(text, add_special_tokens=False).ids
  if not any(token in text for token in vocabulary.SPECIAL):
    assert tokenizer.decode(ids) == text


def test_special_tokens_of_another_tokenizer_are_missed(trained_bpe):
  with pytest.raises(ValueError, match="does not know"):
    vocabulary.encode_prompts(trained_bpe, ["a"])


def test_the_project_reads_it(tokenizer):
  own = Tokenizer.from_dir(vocabulary.MODEL_FOLDER)
  (prompt,) = vocabulary.encode_prompts(tokenizer, [MESSAGES[0]["content"]])
  assert own.encode_chat(MESSAGES[:1]) == prompt
  assert tokenizer.token_to_id(vocabulary.END) in own.eos_ids


def test_transformers_reads_it(tokenizer):
  transformers = pytest.importorskip(
    "transformers", reason="parity needs transformers"
  )
  theirs = transformers.AutoTokenizer.from_pretrained(vocabulary.MODEL_FOLDER)
  own = Tokenizer.from_dir(vocabulary.MODEL_FOLDER)
  ids = theirs.apply_chat_template(
    MESSAGES, add_generation_prompt=True, return_dict=False
  )
  assert ids == own.encode_chat(MESSAGES)
  text = "Naïve café: 日本語 in 1234\n\tlines."
  assert theirs.encode(text) == own.encode(text)
  assert theirs.decode(theirs.encode(text)) == text
  assert theirs.eos_token == vocabulary.END
  assert theirs.pad_token == vocabulary.END_OF_TEXT


def test_training_and_saving(tmp_path):
  texts = ["Ten 10 tents.", *(p.answer for p in tasks.held_out(9))]
  vocabulary.save(vocabulary.train(iter(texts), 300), tmp_path)
  assert vocabulary.load(tmp_path).encode("10").tokens == ["1", "0"]
