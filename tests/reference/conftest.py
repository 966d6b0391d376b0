"""A toy tokenizer and a folder of articles to train on."""

import pytest

from autoematic_jax.models.reference import text
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.models.reference import words


@pytest.fixture(scope="session")
def articles(tmp_path_factory):
  """A folder of three articles, the last of them held out."""
  folder = tmp_path_factory.mktemp("articles")
  made = []
  for number in range(3):
    named = words.WORDS[number:] + words.WORDS[:number]
    sentences = [f"The {word} is number {number}." for word in named]
    made.append("\n\n".join(sentences))
  text.write(folder / text.TRAINING, "article", made[:2])
  text.write(folder / text.HELD_OUT, "article", made[2:])
  return folder


@pytest.fixture(scope="session")
def tokenizer():
  """The tokenizer that the project ships."""
  return vocabulary.load()
