"""Word problems of two or three steps, with names and things."""

import random
from collections.abc import Callable

from autoematic_jax.models.reference import words
from autoematic_jax.models.reference.problem import ANSWER
from autoematic_jax.models.reference.problem import Difficulty
from autoematic_jax.models.reference.problem import Problem

_Told = tuple[str, str, int]
"""Question, worked steps and result."""


def story(rng: random.Random, difficulty: Difficulty) -> Problem:
  """One of several plots with new names, things and numbers."""
  plot = rng.choice(_PLOTS)
  question, steps, result = plot(rng, difficulty)
  return Problem(
    kind="story", prompt=question, answer=f"{steps} {ANSWER} {result}"
  )


def _market(rng: random.Random, difficulty: Difficulty) -> _Told:
  """Has some, buys bags, gives some away."""
  first, second = rng.sample(words.NAMES, 2)
  thing = rng.choice(words.OBJECTS)
  owned = rng.randint(*difficulty.story_numbers)
  bags, each = rng.randint(3, 9), rng.randint(*difficulty.story_factors)
  bought = bags * each
  given = rng.randint(2, owned + bought - 1)
  total = owned + bought
  left = total - given
  question = (
    f"{first} has {owned} {thing} and buys {bags} bags with {each} {thing}"
    f" each. Then {first} gives {given} {thing} to {second}. How many"
    f" {thing} does {first} have left?"
  )
  steps = (
    f"The bags hold {bags}*{each}={bought} {thing}. {first} then has"
    f" {owned}+{bought}={total} {thing}. After giving {given} to {second}"
    f" there are {total}-{given}={left}."
  )
  return question, steps, left


def _together(rng: random.Random, difficulty: Difficulty) -> _Told:
  """Two owners, one known by how many more, asked for the sum."""
  first, second = rng.sample(words.NAMES, 2)
  thing = rng.choice(words.OBJECTS)
  owned = rng.randint(*difficulty.story_numbers)
  more = rng.randint(2, owned - 1)
  sign, word = rng.choice((("+", "more"), ("-", "fewer")))
  other = owned + more if sign == "+" else owned - more
  question = (
    f"{first} has {owned} {thing}. {second} has {more} {word} {thing} than"
    f" {first}. How many {thing} do they have together?"
  )
  steps = (
    f"{second} has {owned}{sign}{more}={other} {thing}. Together they have"
    f" {owned}+{other}={owned + other}."
  )
  return question, steps, owned + other


def _sharing(rng: random.Random, difficulty: Difficulty) -> _Told:
  """Finds more, shares all equally among friends."""
  name = rng.choice(words.NAMES)
  thing = rng.choice(words.OBJECTS)
  friends, each = rng.randint(3, 9), rng.randint(*difficulty.story_factors)
  total = friends * each
  found = rng.randint(2, total - 2)
  owned = total - found
  eaten = rng.randint(1, each - 1)
  question = (
    f"{name} has {owned} {thing} and finds {found} more. All are shared"
    f" equally among {friends} friends, and each friend loses {eaten}. How"
    f" many {thing} has each friend now?"
  )
  steps = (
    f"There are {owned}+{found}={total} {thing}. Each friend gets"
    f" {total}/{friends}={each}. After losing {eaten} each has"
    f" {each}-{eaten}={each - eaten}."
  )
  return question, steps, each - eaten


def _shopping(rng: random.Random, difficulty: Difficulty) -> _Told:
  """Two prices times two amounts, and the change."""
  name = rng.choice(words.NAMES)
  one, two = rng.sample(words.OBJECTS, 2)
  amounts = rng.randint(2, 9), rng.randint(2, 9)
  prices = [rng.randint(*difficulty.story_factors) for _ in range(2)]
  costs = amounts[0] * prices[0], amounts[1] * prices[1]
  total = sum(costs)
  paid = total + rng.randint(*difficulty.story_numbers)
  question = (
    f"{name} buys {amounts[0]} {one} for {prices[0]} dollars each and"
    f" {amounts[1]} {two} for {prices[1]} dollars each, and pays with {paid}"
    " dollars. How much money does the shop give back?"
  )
  steps = (
    f"The {one} cost {amounts[0]}*{prices[0]}={costs[0]} and the {two}"
    f" {amounts[1]}*{prices[1]}={costs[1]}. In all {costs[0]}+{costs[1]}"
    f"={total}. Back come {paid}-{total}={paid - total}."
  )
  return question, steps, paid - total


def _days(rng: random.Random, difficulty: Difficulty) -> _Told:
  """So many a day, less what breaks, added to a stock."""
  name = rng.choice(words.NAMES)
  thing = rng.choice(words.OBJECTS)
  stock = rng.randint(*difficulty.story_numbers)
  daily, days = rng.randint(*difficulty.story_factors), rng.randint(3, 9)
  made = daily * days
  broken = rng.randint(1, made - 1)
  kept = made - broken
  question = (
    f"A shop has {stock} {thing}. {name} makes {daily} {thing} a day for"
    f" {days} days, but {broken} of them break. How many {thing} are in the"
    " shop at the end?"
  )
  steps = (
    f"{name} makes {daily}*{days}={made} {thing}. Whole are"
    f" {made}-{broken}={kept}. The shop then has {stock}+{kept}"
    f"={stock + kept}."
  )
  return question, steps, stock + kept


_PLOTS: tuple[Callable[[random.Random, Difficulty], _Told], ...] = (
  _market,
  _together,
  _sharing,
  _shopping,
  _days,
)
