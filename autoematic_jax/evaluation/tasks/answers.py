"""How written answers are scored."""

import decimal
import re

from autoematic_jax.evaluation.tasks import code_execution
from autoematic_jax.evaluation.tasks.generation import Question
from autoematic_jax.models.reference.problem import final_answer

_NUMBER = re.compile(r"(?:(?<!\d)-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact(item: Question, text: str) -> dict[str, float]:
  """Whether the whole answer is right but for space around it."""
  return {"score": float(text.strip() == item.answer.strip())}


def worked(item: Question, text: str) -> dict[str, float]:
  """`exact`, and whether at least what follows the last `Answer:` is right."""
  right = final_answer(text) == final_answer(item.answer)
  return {**exact(item, text), "final_score": float(right)}


def last_number(text: str) -> decimal.Decimal | None:
  """The last number of a text, however it is written; None without one."""
  found = _NUMBER.findall(text)
  if not found:
    return None
  return decimal.Decimal(re.sub(r"[$,]", "", found[-1]))


def number(item: Question, text: str) -> dict[str, float]:
  """Whether the last number is that of the right answer."""
  return {"score": float(last_number(text) == last_number(item.answer))}


def code(item: Question, text: str) -> dict[str, float]:
  """Whether prompt, completion and test, which is the answer, run through."""
  completion = code_execution.cut_completion(text)
  program = f"{item.prompt}{completion}\n{item.answer}"
  return {"score": float(code_execution.passes(program))}
