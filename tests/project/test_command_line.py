"""What the `autoematic` command does whatever its subcommand."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import autoematic_jax
from autoematic_jax.cli import main as command_line

PROGRAM = "from autoematic_jax.cli.main import main\nmain()"


def autoematic(
  *arguments: str, before: str = ""
) -> subprocess.CompletedProcess[str]:
  """Runs the command in a process of its own, after some Python."""
  return subprocess.run(
    [sys.executable, "-c", before + "\n" + PROGRAM, *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def with_subcommand(body: str) -> str:
  """Python that puts `body` in the place of a subcommand's `run`."""
  indented = "\n".join("  " + line for line in body.splitlines())
  return (
    "import sys, types\n"
    "from autoematic_jax.errors import AutoematicError\n"
    f"def run(args):\n{indented}\n"
    "name = 'autoematic_jax.cli.generate'\n"
    "module = types.ModuleType(name)\n"
    "module.add_arguments = lambda parser: None\n"
    "module.run = run\n"
    "sys.modules[name] = module\n"
  )


def test_help_lists_every_subcommand():
  done = autoematic("--help")
  assert done.returncode == 0
  for name, summary in command_line.COMMANDS.items():
    assert re.search(rf"^ +{name} +{summary}$", done.stdout, re.MULTILINE)


def test_help_waits_for_no_heavy_import():
  report = "import atexit, sys\natexit.register(lambda: print(*sys.modules))"
  modules = autoematic("--help", before=report).stdout.split()
  assert {"absl", "autoematic_jax.cli.main"} <= set(modules)
  assert not {"jax", "numpy", "flax", "orbax"} & set(modules)


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_subcommand_explains_itself(name):
  done = autoematic(name, "--help")
  assert done.returncode == 0, done.stderr
  assert f"usage: autoematic {name}" in done.stdout
  assert "--verbose" in done.stdout


def test_every_subcommand_module_is_listed():
  folder = Path(command_line.__file__).parent
  modules = {
    file.stem
    for file in folder.glob("*.py")
    if "\ndef run(" in file.read_text()
  }
  assert modules == set(command_line.COMMANDS)


def test_version_is_the_packages():
  done = autoematic("--version")
  assert done.stdout.split() == ["autoematic", autoematic_jax.__version__]


def test_unknown_subcommand_is_refused_with_the_known_ones():
  done = autoematic("improve")
  assert done.returncode == 2
  assert "improve" in done.stderr
  for name in command_line.COMMANDS:
    assert name in done.stderr.splitlines()[-1]


def test_subcommand_is_required():
  done = autoematic()
  assert done.returncode == 2
  assert "COMMAND" in done.stderr


def test_code_of_the_subcommand_is_the_exit_code():
  assert (
    autoematic("generate", before=with_subcommand("return 7")).returncode == 7
  )


def test_error_for_the_user_is_one_line():
  before = with_subcommand("raise AutoematicError('weights\\n  are missing')")
  done = autoematic("generate", before=before)
  assert done.returncode == 1
  assert done.stderr == "autoematic generate: error: weights are missing\n"
  assert done.stdout == ""


@pytest.mark.parametrize(
  "arguments",
  [
    ("--verbose", "generate", "fast"),
    ("generate", "--verbose", "fast"),
    ("generate", "fast", "--verbose"),
  ],
)
def test_verbose_shows_the_traceback(arguments):
  before = with_subcommand("raise AutoematicError('weights are missing')") + (
    "add = lambda parser: parser.add_subparsers().add_parser('fast')\n"
    "module.add_arguments = add\n"
  )
  done = autoematic(*arguments, before=before)
  assert done.returncode == 1
  assert "Traceback (most recent call last)" in done.stderr
  assert "AutoematicError: weights are missing" in done.stderr


def test_defect_keeps_its_traceback():
  done = autoematic("generate", before=with_subcommand("return 1 // 0"))
  assert done.returncode == 1
  assert "ZeroDivisionError" in done.stderr


def test_interrupt_is_told_in_one_line():
  before = with_subcommand(
    "import os, signal, time\n"
    "os.kill(os.getpid(), signal.SIGINT)\n"
    "time.sleep(60)"
  )
  done = autoematic("generate", before=before)
  assert done.returncode == 130
  assert done.stderr == "autoematic: interrupted\n"


def test_interrupt_while_a_subcommand_is_imported_is_told_in_one_line():
  before = with_subcommand("return 0") + (
    "class Slow:\n"
    "  def __getattr__(self, name): raise KeyboardInterrupt\n"
    "sys.modules[name] = Slow()\n"
  )
  done = autoematic("generate", before=before)
  assert done.returncode == 130
  assert done.stderr == "autoematic: interrupted\n"


def test_reader_that_goes_away_is_no_error():
  before = with_subcommand("while True:\n  print('text', flush=True)")
  process = subprocess.Popen(
    [sys.executable, "-c", before + PROGRAM, "generate"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "text\n"
  process.stdout.close()
  assert process.stderr.read() == ""
  process.stderr.close()
  assert process.wait() == 128 + signal.SIGPIPE
