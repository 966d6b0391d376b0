"""Whether GPU kernels can be compiled here, where there is no GPU."""

import importlib.util

import jax


def missing() -> str:
  """Why nothing can be compiled here, or an empty string."""
  if jax.__version_info__ < (0, 11):
    return "needs jax 0.11"
  for name in ("jax_plugins.xla_cuda13", "nvidia.cu13"):
    try:
      found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
      found = None
    if found is None:
      return f"needs the CUDA wheels (no {name})"
  return ""
