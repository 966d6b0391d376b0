"""Every kind of problem, and which of them are for training or held out.

A problem follows from its kind and seed alone. Held-out seeds lie below
`FIRST_TRAINING_SEED`; as two seeds can still ask the same question, training
also leaves out every prompt that is held out.
"""

import hashlib
import random
from collections.abc import Callable, Container, Iterable, Iterator

from autoematic_jax.models.reference import arithmetic
from autoematic_jax.models.reference import lists
from autoematic_jax.models.reference import stories
from autoematic_jax.models.reference.problem import Difficulty
from autoematic_jax.models.reference.problem import Problem

_Generator = Callable[[random.Random, Difficulty], Problem]

GENERATORS: dict[str, _Generator] = {
  "addition": arithmetic.addition,
  "subtraction": arithmetic.subtraction,
  "multiplication": arithmetic.multiplication,
  "sort_numbers": lists.sort_numbers,
  "sort_words": lists.sort_words,
  "copy": lists.copy,
  "lookup": lists.lookup,
  "chain": lists.chain,
  "story": stories.story,
}
"""Generator of each kind."""

KINDS = tuple(GENERATORS)

# Kinds that are learned more slowly are seen more often.
_TRAINING_CYCLE = (*KINDS, "multiplication", "multiplication", "story", "chain")

FIRST_TRAINING_SEED = 2**20
"""Seeds below are held out."""

HELD_OUT = 400
"""Problems that are held out."""


def problem(
  kind: str, seed: int, difficulty: Difficulty | None = None
) -> Problem:
  """The problem of a seed.

  Args:
    kind: One of `KINDS`.
    seed: Any integer.
    difficulty: Sizes; None takes the usual ones.
  """
  # Text as a seed is hashed, so that neighbours have nothing in common.
  rng = random.Random(f"{kind} {seed}")
  return GENERATORS[kind](rng, difficulty or Difficulty())


def prompt_hash(prompt: str) -> bytes:
  """What tells prompts apart, without keeping them."""
  return hashlib.blake2b(prompt.encode(), digest_size=8).digest()


def held_out(
  count: int = HELD_OUT, difficulty: Difficulty | None = None
) -> list[Problem]:
  """The held-out problems, every kind in turn, no prompt twice."""
  found: dict[bytes, Problem] = {}
  for seed in range(FIRST_TRAINING_SEED):
    if len(found) == count:
      return list(found.values())
    new = problem(KINDS[seed % len(KINDS)], seed, difficulty)
    found.setdefault(prompt_hash(new.prompt), new)
  raise ValueError(
    f"{count} held-out problems were asked for; {len(found)} differ"
  )


def held_out_hashes(
  count: int = HELD_OUT, difficulty: Difficulty | None = None
) -> frozenset[bytes]:
  """Hashes of the held-out prompts."""
  return frozenset(prompt_hash(p.prompt) for p in held_out(count, difficulty))


def training_problems(
  seeds: Iterable[int],
  excluded: Container[bytes],
  difficulty: Difficulty | None = None,
) -> Iterator[Problem]:
  """Problems to train on, without those of excluded prompts.

  Args:
    seeds: Counted from 0 over the whole of training.
    excluded: Hashes of prompts to leave out.
    difficulty: Sizes; None takes the usual ones.
  """
  for seed in seeds:
    kind = _TRAINING_CYCLE[seed % len(_TRAINING_CYCLE)]
    new = problem(kind, FIRST_TRAINING_SEED + seed, difficulty)
    if prompt_hash(new.prompt) not in excluded:
      yield new
