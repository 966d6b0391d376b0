"""A folder of articles, and which of them are held out."""

import math
from pathlib import Path

HELD_OUT_SHARE = 0.05


def articles(folder: Path) -> tuple[list[str], list[str]]:
  """Articles to train on and, last by name, those that are held out.

  Args:
    folder: Holds one `.txt` an article.

  Raises:
    FileNotFoundError: There are not at least two.
  """
  files = sorted(folder.glob("*.txt"))
  if len(files) < 2:
    raise FileNotFoundError(f"{folder} holds {len(files)} .txt files; need 2")
  texts = [file.read_text(encoding="utf-8").strip() for file in files]
  count = math.ceil(len(texts) * HELD_OUT_SHARE)
  return texts[:-count], texts[-count:]


def sample(held_out: list[str], size: int) -> str:
  """Held-out text of about `size` characters, ending with a paragraph."""
  text = "\n\n".join(held_out)
  if len(text) <= size:
    return text + "\n"
  return text[: text.rfind("\n\n", 0, size)].rstrip() + "\n"
