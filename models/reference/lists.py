"""Sorting, copying and looking things up in a context."""

import random
import string

from autoematic_jax.models.reference import words
from autoematic_jax.models.reference.problem import ANSWER
from autoematic_jax.models.reference.problem import Difficulty
from autoematic_jax.models.reference.problem import Problem


def sort_numbers(rng: random.Random, difficulty: Difficulty) -> Problem:
  """Sorts numbers by sorting each half and merging."""
  low, high = difficulty.sorted_values
  count = rng.randint(*difficulty.sorted_numbers)
  numbers = rng.sample(range(low, high + 1), count)
  question = rng.choice(
    (
      "Sort these numbers from small to large:",
      "Put in ascending order:",
      "Order from the smallest to the largest:",
    )
  )
  return _merge_sort("sort_numbers", question, numbers)


def sort_words(rng: random.Random, difficulty: Difficulty) -> Problem:
  """Sorts words by the alphabet, halves first."""
  chosen = rng.sample(words.WORDS, rng.randint(*difficulty.sorted_words))
  question = rng.choice(
    (
      "Sort these words by the alphabet:",
      "Put in alphabetical order:",
      "Order from A to Z:",
    )
  )
  return _merge_sort("sort_words", question, chosen)


def copy(rng: random.Random, difficulty: Difficulty) -> Problem:
  """Copies codes forwards, backwards or turned by one."""
  count = rng.randint(*difficulty.copied_codes)
  codes = [_code(rng) for _ in range(count)]
  how, result = rng.choice(
    (
      (f"Copy these {count} codes:", codes),
      (f"Write these {count} codes backwards:", codes[::-1]),
      (
        f"Write these {count} codes, the last first, then the rest:",
        [codes[-1], *codes[:-1]],
      ),
    )
  )
  return Problem(
    kind="copy",
    prompt=f"{how} {_joined(codes)}",
    answer=f"{count} codes. {ANSWER} {_joined(result)}",
  )


def lookup(rng: random.Random, difficulty: Difficulty) -> Problem:
  """Finds entries of a table and the largest or smallest of them."""
  keys = rng.sample(words.WORDS, rng.randint(*difficulty.entries))
  values = dict(zip(keys, rng.sample(range(100, 1000), len(keys)), strict=True))
  asked = rng.sample(keys, rng.randint(*difficulty.questions))
  found = [values[key] for key in asked]
  which, final = rng.choice((("largest", max(found)), ("smallest", min(found))))
  table = " ".join(f"{key}={value}" for key, value in values.items())
  steps = "; ".join(f"{key}={values[key]}" for key in asked)
  return Problem(
    kind="lookup",
    prompt=(
      f"Table: {table}\nLook up {_joined(asked)}. Which value is the {which}?"
    ),
    answer=f"{steps}. {ANSWER} {final}",
  )


def chain(rng: random.Random, difficulty: Difficulty) -> Problem:
  """Follows links from word to word."""
  ring = rng.sample(words.WORDS, rng.randint(*difficulty.links))
  links = list(zip(ring, [*ring[1:], ring[0]], strict=True))
  hops = rng.randint(*difficulty.hops)
  rng.shuffle(links)
  listed = " ".join(f"{a}>{b}" for a, b in links)
  # The ring begins anywhere, as the links are shuffled.
  steps = "; ".join(
    f"{hop + 1} {ring[(hop + 1) % len(ring)]}" for hop in range(hops)
  )
  return Problem(
    kind="chain",
    prompt=f"Links: {listed}\nStart at {ring[0]} and follow {hops} links.",
    answer=f"{steps}. {ANSWER} {ring[hops % len(ring)]}",
  )


def _merge_sort(kind: str, question: str, items: list) -> Problem:
  half = (len(items) + 1) // 2
  left, right = sorted(items[:half]), sorted(items[half:])
  answer = (
    f"Left: {_joined(left)}; right: {_joined(right)}."
    f" {ANSWER} {_joined(sorted(items))}"
  )
  return Problem(
    kind=kind, prompt=f"{question} {_joined(items)}", answer=answer
  )


def _code(rng: random.Random) -> str:
  letters = rng.choices(string.ascii_lowercase, k=2)
  return f"{letters[0]}{rng.randrange(10)}{letters[1]}"


def _joined(items: list) -> str:
  return " ".join(map(str, items))
