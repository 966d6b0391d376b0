"""Writes conversations of two turns for `autoematic oracle`, out of a text.

    python tools/text_conversations.py models/reference/checkpoint/sample.txt \
      --count 8 build/told.jsonl

Each turn is the beginning of a paragraph, which the model goes on with: running
text, where a next token is seldom certain.
"""

import argparse
import json
from pathlib import Path

SHORTEST = 300
"""Characters of a paragraph that is taken."""
FIRST, SECOND = 280, 200
"""Characters of the two turns, at most."""


def main() -> None:
  """Writes the conversations."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("text", type=Path)
  parser.add_argument("destination", type=Path)
  parser.add_argument("--count", type=int, default=8)
  args = parser.parse_args()
  text = args.text.read_text(encoding="utf-8")
  lines = conversations(text, args.count)
  args.destination.write_text("".join(json.dumps(x) + "\n" for x in lines))


def conversations(text: str, count: int) -> list[dict[str, list[str]]]:
  """Pairs of paragraphs, spread evenly over the text."""
  paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
  long = [paragraph for paragraph in paragraphs if len(paragraph) > SHORTEST]
  step = max(1, len(long) // (2 * count))
  taken = long[::step][: 2 * count]
  return [
    {"turns": [_begin(first, FIRST), "\n\n" + _begin(second, SECOND)]}
    for first, second in zip(taken[::2], taken[1::2], strict=True)
  ]


def _begin(paragraph, length):
  """Whole words only."""
  return paragraph[:length].rsplit(" ", 1)[0]


if __name__ == "__main__":
  main()
