"""The model that the project ships, read as any Hugging Face folder is."""

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.models.reference import export
from autoematic_jax.models.reference import problem_file
from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import vocabulary

FOLDER = vocabulary.MODEL_FOLDER


def test_it_is_small_enough_to_ship():
  files = [file for file in FOLDER.iterdir() if file.is_file()]
  assert sum(file.stat().st_size for file in files) <= export.LARGEST


def test_its_problems_are_those_that_training_left_out():
  problems = problem_file.load(problem_file.SHIPPED)
  assert problems == tasks.held_out()


def test_it_answers_held_out_problems_after_conversion(tmp_path):
  convert(FOLDER, tmp_path / "bf16", format="bf16", progress=False)
  model = autoematic_jax.load(tmp_path / "bf16")
  # One of each kind.
  problems = tasks.held_out()[: len(tasks.KINDS)]
  problems.sort(key=lambda problem: len(problem.answer))
  result = autoematic_jax.generate(
    model,
    [problem.prompt for problem in problems],
    chat=True,
    max_new_tokens=240,
  )
  assert result.texts == [problem.answer for problem in problems]
