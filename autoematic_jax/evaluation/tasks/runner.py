"""Runs tasks at several precisions and remembers what is finished."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from autoematic_jax.evaluation.contenders import Contenders
from autoematic_jax.evaluation.journal import Journal
from autoematic_jax.evaluation.journal import Record
from autoematic_jax.evaluation.tasks.catalog import Task
from autoematic_jax.language_model import LanguageModel

Records = dict[str, dict[str, list[Record]]]
"""By task and precision, in the order of the items."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
  """What to run.

  Attributes:
    limit: First items of each task to take; None takes all.
    batch: Items whose answers are written at once.
  """

  limit: int | None = None
  batch: int = 16


def check(
  tasks: Sequence[Task], model: LanguageModel, options: TaskOptions
) -> None:
  """Finds what does not fit before anything has run.

  Raises:
    AutoematicError: A task or one of its items does not suit the model.
  """
  for task in tasks:
    task.encode(model, _indices(task, options))


def identities(tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
  """Number and hash of each task's items, for a report."""
  return {task.name: _identity(task) for task in tasks}


def _identity(task):
  data = json.dumps([dataclasses.asdict(item) for item in task.items])
  digest = hashlib.sha256(data.encode()).hexdigest()
  return {"items": len(task.items), "sha256": digest}


def measure(
  tasks: Sequence[Task],
  contenders: Contenders,
  precisions: Sequence[str],
  options: TaskOptions,
  journal: Journal,
) -> Records:
  """Runs each task at each precision.

  Args:
    tasks: From the catalog.
    contenders: Who runs each precision.
    precisions: Names as `parse_precision` takes them.
    options: Which items, and how many at once.
    journal: Remembers finished items.

  Returns:
    Records that the tasks gave.
  """
  return {
    task.name: _measure_task(task, contenders, precisions, options, journal)
    for task in tasks
  }


def _measure_task(task, contenders, precisions, options, journal):
  indices = _indices(task, options)
  total = len(indices) * len(precisions)
  with tqdm(total=total, desc=task.name, unit="item") as progress:
    return {
      precision: _measure_precision(
        task,
        contenders.of(precision),
        precision,
        indices,
        options.batch,
        journal,
        progress,
      )
      for precision in precisions
    }


def _measure_precision(
  task, model, precision, indices, batch, journal, progress
):
  found = {
    index: journal.find(task.name, precision, index) for index in indices
  }
  left = [index for index in indices if found[index] is None]
  progress.update(len(indices) - len(left))
  if left:
    for index, record in task.run(model, precision, left, batch=batch):
      journal.add(task.name, precision, index, record=record)
      found[index] = record
      progress.update()
  return [found[index] for index in indices]


def _indices(task, options):
  return range(len(task.items))[: options.limit]
