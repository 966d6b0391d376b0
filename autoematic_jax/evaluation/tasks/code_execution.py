"""Runs programs that a model wrote.

The limits stop loops, memory hogs and large files. They are no sandbox: the
program can do whatever its user may.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10.0
"""Time for one program."""

_MEMORY = 2 * 2**30
_FILE_SIZE = 16 * 2**20

# A function's body ends where something else begins at the margin.
_NEXT_TOP_LEVEL = re.compile(r"\n(?:class|def|#|if|print)")

# Limits are set by the new process itself: code between fork and exec could
# hang, as JAX runs threads. A program that leaves early has not passed.
_LAUNCHER = """
import resource, sys
cpu, memory, file_size = map(int, sys.argv[1:4])
for name, limit in (("CPU", cpu), ("AS", memory), ("FSIZE", file_size),
                    ("CORE", 0)):
  resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
try:
  with open(sys.argv[4], encoding="utf-8") as file:
    exec(compile(file.read(), "program", "exec"), {"__name__": "program"})
except BaseException:
  sys.exit(1)
"""


def cut_completion(text: str) -> str:
  """What belongs to the function that a prompt began."""
  return _NEXT_TOP_LEVEL.split(text, maxsplit=1)[0]


def passes(program: str, *, seconds: float = SECONDS) -> bool:
  """Whether a program runs to its end, in a process and folder of its own.

  Args:
    program: Python source.
    seconds: When to stop it.
  """
  with tempfile.TemporaryDirectory(
    prefix="autoematic-", ignore_cleanup_errors=True
  ) as folder:
    path = Path(folder, "program.py")
    path.write_text(program, encoding="utf-8", errors="replace")
    limits = map(str, (math.ceil(seconds), _MEMORY, _FILE_SIZE))
    process = subprocess.Popen(
      [sys.executable, "-I", "-c", _LAUNCHER, *limits, str(path)],
      cwd=folder,
      env=_environment(),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )
    try:
      return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
      return False
    finally:
      # Processes that the program has started go with it.
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def _environment():
  """What Python needs to start, and nothing that a program could read out."""
  kept = ("LD_LIBRARY_PATH", "LANG")
  found = {name: os.environ[name] for name in kept if name in os.environ}
  return {"PATH": os.defpath, **found}
