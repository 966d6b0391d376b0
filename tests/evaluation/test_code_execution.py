"""Programs of a model run apart, and not for ever."""

import time

import pytest

from autoematic_jax.evaluation.tasks import code_execution


@pytest.mark.parametrize(
  ("text", "kept"),
  [
    ("  return 1\n\ndef g():\n  pass", "  return 1\n"),
    ("  return 1\nclass A:", "  return 1"),
    ("  if x:\n    return 1\nif y:", "  if x:\n    return 1"),
    ("  return 1\n# more", "  return 1"),
    ("  print(1)\nprint(2)", "  print(1)"),
    ("  return 1\n  # inside", "  return 1\n  # inside"),
  ],
)
def test_a_completion_ends_where_the_margin_is_used_again(text, kept):
  assert code_execution.cut_completion(text) == kept


@pytest.mark.parametrize(
  ("program", "passed"),
  [
    ("assert 1 + 1 == 2", True),
    ("assert 1 + 1 == 3", False),
    ("def broken(:", False),
    ("import sys\nsys.exit(0)\nassert False", False),
    ("x = bytearray(4 * 2**30)", False),
    ("open('big', 'wb').write(bytes(32 * 2**20))", False),
    ("import os\nassert 'SECRET' not in os.environ", True),
    ("import os\nassert os.listdir() == ['program.py']", True),
  ],
)
def test_a_program_passes_if_it_runs_through(program, passed, monkeypatch):
  monkeypatch.setenv("SECRET", "1")
  assert code_execution.passes(program) is passed


def test_a_program_that_goes_on_is_stopped_with_what_it_started(tmp_path):
  started = tmp_path / "started"
  child = (
    "import pathlib, time\n"
    f"pathlib.Path({str(started)!r}).touch()\n"
    "while True: time.sleep(0.01)"
  )
  program = (
    "import os, subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    f"while not os.path.exists({str(started)!r}): pass\n"
    f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    "while True: pass"
  )
  assert not code_execution.passes(program, seconds=2.0)
  assert started.exists()
  assert not is_running(int((tmp_path / "pid").read_text()))


def is_running(pid: int) -> bool:
  """Whether a process does more than wait to be collected."""
  deadline = time.monotonic() + 10
  while time.monotonic() < deadline:
    try:
      with open(f"/proc/{pid}/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
      return False
    if state in "ZX":
      return False
  return True
