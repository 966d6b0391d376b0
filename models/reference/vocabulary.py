"""The tokenizer: how it is trained, saved and used to encode problems.

    python -m autoematic_jax.models.reference.vocabulary --text FOLDER

writes `tokenizer.json` and `tokenizer_config.json` into the model's folder.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import text as text_lib
from autoematic_jax.models.reference.problem import Problem

SIZE = 4096

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL = (END_OF_TEXT, USER, ASSISTANT, END)
"""Tokens 0 to 3."""

MODEL_FOLDER = Path(__file__).resolve().parent / "checkpoint"
"""What the project ships: the tokenizer, and the weights once trained."""

CHAT_TEMPLATE = (
  "{% for message in messages %}"
  "{% if message['role'] not in ('user', 'assistant') %}"
  "{{ raise_exception('roles are user and assistant') }}"
  "{% endif %}"
  "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_MAX_TOKENS = 1024


def train(texts: Iterator[str], size: int = SIZE) -> tokenizers.Tokenizer:
  """A byte-level BPE in which every digit is a token of its own."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=list(SPECIAL),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
  """Writes the files that transformers and this project read."""
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": END_OF_TEXT,
    "additional_special_tokens": [USER, ASSISTANT],
    "clean_up_tokenization_spaces": False,
    "model_max_length": _MAX_TOKENS,
    "chat_template": CHAT_TEMPLATE,
  }
  (folder / "tokenizer_config.json").write_text(
    json.dumps(config, indent=2) + "\n"
  )


def load(folder: Path = MODEL_FOLDER) -> tokenizers.Tokenizer:
  """The tokenizer of a model's folder."""
  return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_prompts(
  tokenizer: tokenizers.Tokenizer, prompts: Sequence[str]
) -> list[list[int]]:
  """Prompts as the chat template frames them, ready for an answer."""
  user, assistant, end = (
    token_id(tokenizer, name) for name in (USER, ASSISTANT, END)
  )
  encoded = tokenizer.encode_batch_fast(prompts)
  return [[user, *e.ids, end, assistant] for e in encoded]


def encode_answers(
  tokenizer: tokenizers.Tokenizer, problems: Sequence[Problem]
) -> list[list[int]]:
  """Worked answers with the token that ends them."""
  end = token_id(tokenizer, END)
  encoded = tokenizer.encode_batch_fast([p.answer for p in problems])
  return [[*e.ids, end] for e in encoded]


def encode_articles(
  tokenizer: tokenizers.Tokenizer, articles: Sequence[str]
) -> list[int]:
  """All articles in one row, each ended by `<|endoftext|>`."""
  end = token_id(tokenizer, END_OF_TEXT)
  ids = []
  for encoded in tokenizer.encode_batch_fast(articles):
    ids += [*encoded.ids, end]
  return ids


def token_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
  """Number of a special token.

  Raises:
    ValueError: The tokenizer is another one.
  """
  found = tokenizer.token_to_id(token)
  if found is None:
    raise ValueError(f"the tokenizer does not know {token}")
  return found


def training_texts(articles: list[str], problems: int) -> Iterator[str]:
  """What the vocabulary is made from."""
  yield from articles
  excluded = tasks.held_out_hashes()
  for problem in tasks.training_problems(range(problems), excluded):
    yield problem.prompt
    yield problem.answer


def main() -> None:
  """Trains the tokenizer and tells what a problem costs in tokens."""
  parser = argparse.ArgumentParser(description="Train the tokenizer.")
  parser.add_argument("--text", type=Path, required=True)
  parser.add_argument("--out", type=Path, default=MODEL_FOLDER)
  parser.add_argument("--problems", type=int, default=8000)
  args = parser.parse_args()
  articles, _ = text_lib.articles(args.text)
  tokenizer = train(training_texts(articles, args.problems))
  save(tokenizer, args.out)
  tokens = len(encode_articles(tokenizer, articles))
  letters = sum(map(len, articles))
  print(
    f"{tokenizer.get_vocab_size()} tokens; text: {tokens} tokens,"
    f" {letters / tokens:.2f} characters each"
  )
  held_out = tasks.held_out()
  prompts = encode_prompts(tokenizer, [p.prompt for p in held_out])
  answers = encode_answers(tokenizer, held_out)
  for kind in tasks.KINDS:
    rows = [i for i, p in enumerate(held_out) if p.kind == kind]
    sizes = [sorted(len(ids[i]) for i in rows) for ids in (prompts, answers)]
    print(
      f"{kind}: prompts {sizes[0][0]} to {sizes[0][-1]},"
      f" answers {sizes[1][0]} to {sizes[1][-1]} tokens"
    )


if __name__ == "__main__":
  main()
