"""What a measurement was made on."""

import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path

import jax


def machine() -> dict[str, str | int]:
  """Processor, cores, memory and accelerator, for a report."""
  return {
    "processor": _processor(),
    "cores": len(os.sched_getaffinity(0)),
    "memory_gb": round(
      os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    ),
    "device": jax.devices()[0].device_kind,
    "system": platform.system(),
  }


def _processor():
  """Marketing name and widest vector extension, where Linux tells."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
  fields = {key.strip(): value.strip() for key, value in fields.items()}
  flags = fields.get("flags", "").split()
  vector = next((f for f in ("avx512f", "avx2", "avx") if f in flags), "")
  return f"{fields.get('model name', platform.machine())} {vector}".strip()


def versions() -> dict[str, str]:
  """Versions of Python and the libraries that decide speed."""
  names = ("autoematic_jax", "jax", "jaxlib", "flax", "numpy")
  found = {name: importlib.metadata.version(name) for name in names}
  return {"python": platform.python_version(), **found}


def command() -> str:
  """The command line that is running."""
  return " ".join(["autoematic", *sys.argv[1:]])


def peak_rss_mb() -> float:
  """Largest resident memory of this process so far, in MB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  scale = 1 if sys.platform == "darwin" else 1024
  return peak * scale / 1e6
