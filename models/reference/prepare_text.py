r"""Makes a folder of English text, one article a file.

    python -m autoematic_jax.models.reference.prepare_text \
      --wheel gensim-4.4.0-….whl --out FOLDER

The text is the part of the English Wikipedia that gensim's wheel carries for
its tests, and the documentation in Python's own standard library.
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
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  # The last articles by name are held out, and are to be Wikipedia's.
  sources = {
    "library": library_docstrings(),
    "python": python_topics(),
    "wikipedia": wikipedia_articles(args.wheel),
  }
  for name, articles in sources.items():
    long = [text for text in articles if len(text) >= _SHORTEST]
    for number, article in enumerate(long):
      path = args.out / f"{name}-{number:04}.txt"
      path.write_text(article + "\n", encoding="utf-8")
    size = sum(map(len, long))
    print(f"{name}: {len(long)} articles, {size / 1e6:.2f} M characters")


if __name__ == "__main__":
  main()
