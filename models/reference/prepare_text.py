r"""Makes a folder of English text, one article a file.

    python -m autoematic_jax.models.reference.prepare_text \
      --wheel gensim-4.4.0-….whl --debian FOLDER --out FOLDER

The text is the part of the English Wikipedia that gensim's wheel carries for
its tests, manuals and a dictionary that Debian packages, and the documentation
in Python's own standard library. Some of Wikipedia is held out.
"""

import argparse
import ast
import bz2
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from xml.etree import ElementTree

from autoematic_jax.models.reference import debian_text
from autoematic_jax.models.reference import text as text_lib
from autoematic_jax.models.reference import wikitext

_DUMP = "enwiki-latest-pages-articles1.xml"

_SHORTEST = 600
"""Characters; shorter articles are stubs and remains."""

_SHORTEST_DOCSTRING = 200

_SKIPPED_FOLDERS = frozenset(
  {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
)


def wikipedia_articles(wheel: Path) -> Iterator[str]:
  """Plain text of every article in the wheel's Wikipedia file.

  Raises:
    FileNotFoundError: The wheel has no such file.
  """
  with zipfile.ZipFile(wheel) as archive:
    dumps = [name for name in archive.namelist() if _DUMP in name]
    if not dumps:
      raise FileNotFoundError(f"{wheel} holds no {_DUMP}*.bz2")
    data = bz2.decompress(archive.read(dumps[0]))
  namespace = "{*}"
  for page in ElementTree.fromstring(data).iterfind(f"{namespace}page"):
    title = page.findtext(f"{namespace}title") or ""
    markup = page.findtext(f"{namespace}revision/{namespace}text") or ""
    redirects = page.find(f"{namespace}redirect") is not None
    if page.findtext(f"{namespace}ns") == "0" and not redirects:
      yield f"{title}\n\n{wikitext.plain_text(markup)}"


def python_topics() -> Iterator[str]:
  """The chapters of the language reference that `help()` shows."""
  for _, text in sorted(topics.topics.items()):
    yield text.strip()


def library_docstrings() -> Iterator[str]:
  """The longer docstrings of each module of the standard library."""
  root = Path(sysconfig.get_path("stdlib"))
  for file in sorted(root.rglob("*.py")):
    parts = file.relative_to(root).parts
    if _SKIPPED_FOLDERS.isdisjoint(parts):
      found = _docstrings(file)
      if found:
        yield "\n\n".join([f"Module {'.'.join(parts)[:-3]}", *found])


def _docstrings(file: Path) -> list[str]:
  try:
    tree = ast.parse(file.read_bytes())
  except (SyntaxError, ValueError):
    return []
  texts = (
    ast.get_docstring(node)
    for node in ast.walk(tree)
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
  )
  return [text for text in texts if text and len(text) > _SHORTEST_DOCSTRING]


def main() -> None:
  """Writes the folder and tells its size."""
  parser = argparse.ArgumentParser(description="Make the folder of text.")
  parser.add_argument("--wheel", type=Path, required=True)
  parser.add_argument("--debian", type=Path, required=True)
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  sources = {
    "wikipedia": wikipedia_articles(args.wheel),
    "library": library_docstrings(),
    "python": python_topics(),
    "dictionary": debian_text.dictionary_articles(args.debian),
  }
  for package in debian_text.MANUALS:
    sources[package] = debian_text.manual_pages(args.debian, package)
  for name, found in sources.items():
    articles = [text for text in found if len(text) >= _SHORTEST]
    held_out = text_lib.held_out(len(articles)) if name == "wikipedia" else 0
    kept = len(articles) - held_out
    text_lib.write(args.out / text_lib.TRAINING, name, articles[:kept])
    text_lib.write(args.out / text_lib.HELD_OUT, name, articles[kept:])
    size = sum(map(len, articles))
    print(
      f"{name}: {len(articles)} articles, {held_out} of them held out,"
      f" {size / 1e6:.2f} M characters"
    )


if __name__ == "__main__":
  main()
