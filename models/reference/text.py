"""A folder of articles, those to train on apart from those held out."""

import math
from pathlib import Path

TRAINING = "training"
HELD_OUT = "held_out"
"""Folders inside the folder; each holds one `.txt` an article."""

_HELD_OUT_SHARE = 0.1


def held_out(count: int) -> int:
  """How many of so many articles are held out."""
  return math.ceil(count * _HELD_OUT_SHARE)


def write(folder: Path, name: str, articles: list[str]) -> None:
  """Writes articles as `NAME-0000.txt` and on."""
  folder.mkdir(parents=True, exist_ok=True)
  for number, article in enumerate(articles):
    path = folder / f"{name}-{number:04}.txt"
    path.write_text(article.strip() + "\n", encoding="utf-8")


def articles(folder: Path) -> tuple[list[str], list[str]]:
  """Articles to train on, and those that are held out, by name.

  Raises:
    FileNotFoundError: There are none of either.
  """
  found = []
  for part in (TRAINING, HELD_OUT):
    files = sorted((folder / part).glob("*.txt"))
    if not files:
      raise FileNotFoundError(f"{folder / part} holds no .txt files")
    found.append([file.read_text(encoding="utf-8").strip() for file in files])
  return found[0], found[1]


def sample(held_out: list[str], size: int) -> str:
  """Held-out text of about `size` characters, ending with a paragraph."""
  text = "\n\n".join(held_out)
  if len(text) <= size:
    return text + "\n"
  return text[: text.rfind("\n\n", 0, size)].rstrip() + "\n"
