import random
import re

import pytest

from autoematic_jax.models.reference import lists
from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.models.reference import words
from autoematic_jax.models.reference.problem import Difficulty
from autoematic_jax.models.reference.problem import Problem
from autoematic_jax.models.reference.problem import final_answer

SEEDS = range(100)
EQUATION = re.compile(r"(\d+(?:[-+*/]\d+)+)=(\d+)")


def of_kind(kind: str) -> list[Problem]:
  return [tasks.problem(kind, seed) for seed in SEEDS]


def listed(prompt: str) -> list[str]:
  return prompt.partition(": ")[2].split()


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_a_problem_follows_from_its_seed(kind):
  assert of_kind(kind) == of_kind(kind)
  assert len({p.prompt for p in of_kind(kind)}) == len(SEEDS)


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_every_equation_in_an_answer_is_true(kind):
  for problem in of_kind(kind):
    for left, right in EQUATION.findall(problem.answer):
      assert eval(left) == int(right), problem


@pytest.mark.parametrize(
  ("kind", "operation"),
  [
    ("addition", lambda a, b: a + b),
    ("subtraction", lambda a, b: abs(a - b)),
    ("multiplication", lambda a, b: a * b),
  ],
)
def test_arithmetic_is_right(kind, operation):
  for problem in of_kind(kind):
    a, b = map(int, re.findall(r"\d+", problem.prompt))
    assert int(problem.final) == operation(a, b), problem


@pytest.mark.parametrize(
  ("kind", "of"), [("sort_numbers", int), ("sort_words", str)]
)
def test_lists_are_sorted(kind, of):
  for problem in of_kind(kind):
    items = [of(item) for item in listed(problem.prompt)]
    assert problem.final == " ".join(map(str, sorted(items)))


def test_copies_hold_the_codes_in_the_order_asked_for():
  for problem in of_kind("copy"):
    codes, copied = listed(problem.prompt), problem.final.split()
    if "backwards" in problem.prompt:
      codes.reverse()
    elif "last first" in problem.prompt:
      codes = [codes[-1], *codes[:-1]]
    assert copied == codes


def test_looked_up_values_are_those_of_the_table():
  for problem in of_kind("lookup"):
    table = dict(re.findall(r"(\w+)=(\d+)", problem.prompt))
    found = dict(re.findall(r"(\w+)=(\d+)", problem.answer))
    asked = re.search(r"Look up ([\w ]+)\.", problem.prompt)[1].split()
    assert list(found) == asked
    assert found.items() <= table.items()
    best = max if "largest" in problem.prompt else min
    assert problem.final == best(found.values(), key=int)


def test_links_are_followed():
  for problem in of_kind("chain"):
    links = dict(re.findall(r"(\w+)>(\w+)", problem.prompt))
    place, hops = re.search(
      r"at (\w+) and follow (\d+)", problem.prompt
    ).groups()
    for _ in range(int(hops)):
      place = links[place]
    assert problem.final == place


def test_a_story_ends_with_its_last_result():
  for problem in of_kind("story"):
    assert EQUATION.findall(problem.answer)[-1][1] == problem.final


def test_answers_are_neither_short_nor_long(tokenizer):
  for kind in tasks.KINDS:
    answers = vocabulary.encode_answers(tokenizer, of_kind(kind))
    assert min(map(len, answers)) >= 20, kind
    assert max(map(len, answers)) <= 240, kind


def test_difficulty_is_obeyed():
  difficulty = Difficulty(sorted_numbers=(3, 3), sorted_values=(5, 9))
  problem = lists.sort_numbers(random.Random(0), difficulty)
  numbers = listed(problem.prompt)
  assert len(numbers) == 3
  assert all(5 <= int(n) <= 9 for n in numbers)


def test_held_out_problems_differ_and_are_of_every_kind():
  problems = tasks.held_out(45)
  assert len({p.prompt for p in problems}) == 45
  counts = [sum(p.kind == kind for p in problems) for kind in tasks.KINDS]
  assert counts == [5] * len(tasks.KINDS)


def test_training_holds_no_held_out_prompt():
  # Sums so small that the same ones come up again and again.
  easy = Difficulty(sum_digits=(1, 1))
  excluded = tasks.held_out_hashes(200, easy)
  seeds = range(3000)

  def hashes(excluded):
    problems = tasks.training_problems(seeds, excluded, easy)
    return {tasks.prompt_hash(p.prompt) for p in problems}

  assert hashes(frozenset()) & excluded
  assert not hashes(excluded) & excluded


def test_too_few_different_problems_are_an_error(monkeypatch):
  monkeypatch.setattr(tasks, "FIRST_TRAINING_SEED", 5)
  with pytest.raises(ValueError, match="6 held-out problems"):
    tasks.held_out(6)


def test_final_answer_of_text_without_one():
  assert final_answer("1+1=2") == ""


def test_words_are_unique():
  assert len(set(words.WORDS)) == len(words.WORDS)
