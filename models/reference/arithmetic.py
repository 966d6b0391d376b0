"""Sums, differences and products, written out digit by digit."""

import random

from autoematic_jax.models.reference.problem import ANSWER
from autoematic_jax.models.reference.problem import Difficulty
from autoematic_jax.models.reference.problem import Problem


def addition(rng: random.Random, difficulty: Difficulty) -> Problem:
  """Two terms, added from the last digit with carries."""
  first = _number(rng, difficulty.sum_digits)
  second = _number(rng, difficulty.sum_digits)
  steps, carry = [], 0
  for a, b in _columns(first, second):
    total = a + b + carry
    steps.append(f"{a}+{b}+{carry}={total}, carry {total // 10}")
    carry = total // 10
  question = rng.choice(
    (
      f"What is {first} + {second}?",
      f"Add {first} and {second}.",
      f"Find the sum of {first} and {second}.",
    )
  )
  return _worked("addition", question, steps, first + second)


def subtraction(rng: random.Random, difficulty: Difficulty) -> Problem:
  """The smaller of two numbers taken from the larger, with borrows."""
  numbers = [_number(rng, difficulty.sum_digits) for _ in range(2)]
  second, first = sorted(numbers)
  steps, borrow = [], 0
  for a, b in _columns(first, second):
    taken = b + borrow
    lent = int(a < taken)
    a += 10 * lent
    steps.append(f"{a}-{b}-{borrow}={a - taken}, borrow {lent}")
    borrow = lent
  question = rng.choice(
    (
      f"What is {first} - {second}?",
      f"Subtract {second} from {first}.",
      f"Find the difference of {first} and {second}.",
    )
  )
  return _worked("subtraction", question, steps, first - second)


def multiplication(rng: random.Random, difficulty: Difficulty) -> Problem:
  """One row of products for each digit of the second factor, then the sum."""
  first = _number(rng, difficulty.factor_digits)
  second = _number(rng, difficulty.multiplier_digits)
  steps, rows = [], []
  for place, digit in enumerate(reversed(str(second))):
    row = first * int(digit) * 10**place
    products = " ".join(_products(first, int(digit)))
    steps.append(f"{products} gives {row}")
    rows.append(row)
  if len(rows) > 1:
    steps.append("+".join(map(str, rows)) + f"={sum(rows)}")
  question = rng.choice(
    (
      f"What is {first} * {second}?",
      f"Multiply {first} by {second}.",
      f"Find the product of {first} and {second}.",
    )
  )
  return _worked("multiplication", question, steps, first * second)


def _products(first: int, digit: int) -> list[str]:
  """`7*6+0=42`, last digit first, the carry added."""
  carry, steps = 0, []
  for a in reversed(str(first)):
    product = int(a) * digit + carry
    steps.append(f"{a}*{digit}+{carry}={product}")
    carry = product // 10
  return steps


def _number(rng: random.Random, digits: tuple[int, int]) -> int:
  # The number of digits is drawn first: short numbers would be rare.
  count = rng.randint(*digits)
  return rng.randint(max(2, 10 ** (count - 1)), 10**count - 1)


def _columns(first: int, second: int) -> list[tuple[int, int]]:
  """Digits of equal place, last place first, the shorter filled with 0."""
  a, b = str(first)[::-1], str(second)[::-1]
  width = max(len(a), len(b))
  return [
    (int(x), int(y))
    for x, y in zip(a.ljust(width, "0"), b.ljust(width, "0"), strict=True)
  ]


def _worked(kind, question, steps, result) -> Problem:
  answer = "; ".join(steps) + f". {ANSWER} {result}"
  return Problem(kind=kind, prompt=question, answer=answer)
