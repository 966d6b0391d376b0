"""The file of held-out problems that lies beside the trained model."""

import json
from pathlib import Path

from autoematic_jax.models.reference.problem import Problem

NAME = "held_out.jsonl"

SHIPPED = Path(__file__).resolve().parent / "checkpoint" / NAME
"""The problems that the project ships."""


def save(path: Path, problems: list[Problem]) -> None:
  """One JSON object a line: kind, prompt, answer and final answer."""
  lines = (
    json.dumps(
      {
        "kind": p.kind,
        "prompt": p.prompt,
        "answer": p.answer,
        "final": p.final,
      }
    )
    for p in problems
  )
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(path: Path) -> list[Problem]:
  """Reads what `save` wrote."""
  entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
  return [
    Problem(kind=e["kind"], prompt=e["prompt"], answer=e["answer"])
    for e in entries
  ]
