"""What one procedural problem is, and how hard its kinds are."""

import dataclasses

ANSWER = "Answer:"
"""Stands before the final answer in every worked answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One question with its worked answer.

  Attributes:
    kind: Name of its generator, such as `addition`.
    prompt: What the user asks.
    answer: Every step, then `Answer:` and the final answer.
  """

  kind: str
  prompt: str
  answer: str

  @property
  def final(self) -> str:
    """The final answer alone."""
    return final_answer(self.answer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difficulty:
  """Sizes of the problems; each a smallest and a largest value, inclusive.

  Attributes:
    sum_digits: Digits of the terms of additions and subtractions.
    factor_digits: Digits of the first factor of a multiplication.
    multiplier_digits: Digits of the second factor.
    sorted_numbers: How many numbers to sort.
    sorted_values: The numbers that are sorted.
    sorted_words: How many words to sort.
    copied_codes: How many codes to copy.
    entries: Entries of a table that is looked up.
    questions: Entries of it that are asked for.
    links: Entries of a chain of links.
    hops: Links to follow.
    story_numbers: Numbers that a story begins with.
    story_factors: The larger factors of its products.
  """

  sum_digits: tuple[int, int] = (5, 10)
  factor_digits: tuple[int, int] = (3, 5)
  multiplier_digits: tuple[int, int] = (2, 2)
  sorted_numbers: tuple[int, int] = (10, 16)
  sorted_values: tuple[int, int] = (10, 9999)
  sorted_words: tuple[int, int] = (12, 18)
  copied_codes: tuple[int, int] = (14, 24)
  entries: tuple[int, int] = (16, 28)
  questions: tuple[int, int] = (5, 8)
  links: tuple[int, int] = (16, 24)
  hops: tuple[int, int] = (12, 15)
  story_numbers: tuple[int, int] = (120, 989)
  story_factors: tuple[int, int] = (6, 39)


def final_answer(text: str) -> str:
  """What follows the last `Answer:` of a text; "" where there is none."""
  _, found, final = text.rpartition(ANSWER)
  return final.strip() if found else ""
