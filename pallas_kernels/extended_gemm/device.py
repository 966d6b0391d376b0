"""Which device a GEMM runs on."""

from typing import Any

import jax

from autoematic_jax.errors import PrecisionError


def runs_on(capability: str) -> bool:
  """Whether the default device is a GPU of a compute capability."""
  return getattr(_default_device(), "compute_capability", None) == capability


def check_device(implementation: str, capability: str, gpu: str) -> None:
  """Refuses a default device of another kind.

  Args:
    implementation: Who asks.
    capability: Compute capability that it needs, as "9.0".
    gpu: Name of such GPUs.

  Raises:
    PrecisionError: Names the device and what to use there.
  """
  if not runs_on(capability):
    device = _default_device()
    found = getattr(device, "compute_capability", None)
    raise PrecisionError(
      f"{implementation!r} needs a {gpu} GPU (compute capability"
      f" {capability}); the default device is {device}"
      f" ({getattr(device, 'device_kind', 'unknown')}, compute capability"
      f" {found}). Use 'xla' with expand([qtensor]) there, or 'reference'"
      " with the qtensor"
    )


def _default_device() -> Any:
  # An option that jax registers at run time.
  return getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
