"""English text out of Debian packages of documentation.

`apt-get download` fetches them without installing anything; `dpkg-deb` opens
them.
"""

import gzip
import re
import subprocess
import tarfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

MANUALS = {
  "debian-faq": r"\.en\.html$",
  "debian-handbook": r"/en-US/[^/]+\.html$",
  "debian-history": r"\.en\.html$",
  "debian-policy": r"\.html$",
  "debian-reference-en": r"\.en\.html$",
  "developers-reference": r"\.html$",
  "git-doc": r"\.html$",
  "postgresql-doc-15": r"\.html$",
}
"""Packages of manuals, and the paths of their English pages."""

DICTIONARY = "dict-gcide"
"""The package of Webster's dictionary of 1913, with later additions."""

_DICTIONARY_PATH = r"/gcide\.dict\.dz$"

# One article of so many entries in a row out of so many: the dictionary is
# larger than everything else together.
_ENTRIES, _ENTRIES_APART = 40, 120

_SOURCE_LINE = re.compile(
  r"^ *\[[^\]\n]*(?:Webster|WordNet|PJC)[^\]\n]*\]$", re.MULTILINE
)

_BLOCKS = frozenset({"p", "h1", "h2", "h3", "h4", "dd", "dt", "li", "td"})
_LEFT_OUT = frozenset({"head", "nav", "pre", "script", "style", "table"})
_SHORTEST_BLOCK = 40


def manual_pages(folder: Path, package: str) -> Iterator[str]:
  """The prose of each page of a package of `MANUALS`.

  Raises:
    FileNotFoundError: The folder does not hold the package.
  """
  for page in _files(folder, package, MANUALS[package]):
    yield page_text(page.decode("utf-8", errors="replace"))


def dictionary_articles(folder: Path) -> Iterator[str]:
  """Stretches of the dictionary.

  Raises:
    FileNotFoundError: The folder does not hold the package.
  """
  for packed in _files(folder, DICTIONARY, _DICTIONARY_PATH):
    text = gzip.decompress(packed).decode("utf-8", errors="replace")
    entries = dictionary_entries(text)
    for first in range(0, len(entries), _ENTRIES_APART):
      yield "\n\n".join(entries[first : first + _ENTRIES])


def dictionary_entries(text: str) -> list[str]:
  """Headwords with their explanations, without marks of source and link."""
  text = _SOURCE_LINE.sub("", text)
  text = re.sub(r"[{}]|\\[^\\\n]*\\", "", text)
  # Explanations are indented, headwords are not.
  found = re.split(r"\n\n(?=\S)", text)
  return [" ".join(entry.split()) for entry in found]


def page_text(html: str) -> str:
  """The paragraphs of an HTML page, without examples and tables."""
  page = _Page()
  page.feed(html)
  page.close()
  return "\n\n".join(page.blocks())


class _Page(HTMLParser):
  """Collects the text of blocks."""

  def __init__(self):
    super().__init__()
    self._left_out = 0
    self._blocks: list[list[str]] = [[]]

  def handle_starttag(self, tag, attrs):
    self._left_out += tag in _LEFT_OUT
    if tag in _BLOCKS:
      self._blocks.append([])

  def handle_endtag(self, tag):
    if self._left_out:
      self._left_out -= tag in _LEFT_OUT
    if tag in _BLOCKS:
      self._blocks.append([])

  def handle_data(self, data):
    if not self._left_out:
      self._blocks[-1].append(data)

  def blocks(self) -> Iterator[str]:
    """What is long enough to be a sentence."""
    for block in self._blocks:
      text = " ".join("".join(block).split())
      if len(text) >= _SHORTEST_BLOCK:
        yield text


def _files(folder: Path, package: str, path: str) -> Iterator[bytes]:
  """Contents of the files of a package whose paths match, by path."""
  found = sorted(folder.glob(f"{package}_*.deb"))
  if not found:
    raise FileNotFoundError(
      f"{folder} holds no {package}_*.deb; `apt-get download {package}` in it"
    )
  with subprocess.Popen(
    ["dpkg-deb", "--fsys-tarfile", found[-1]], stdout=subprocess.PIPE
  ) as process:
    contents = {}
    with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
      for member in archive:
        if re.search(path, member.name) and (
          file := archive.extractfile(member)
        ):
          contents[member.name] = file.read()
  if process.returncode:
    raise ValueError(f"dpkg-deb could not read {found[-1]}")
  for name in sorted(contents):
    yield contents[name]
