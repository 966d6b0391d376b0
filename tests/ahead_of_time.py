"""Compiles GPU kernels where there is no GPU."""

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


def device(
  name: str,
  *,
  capability: int,
  processors: int,
  bandwidth: int,
  l2_bytes: int,
  clock_ghz: float,
  memory_bytes: int,
) -> str:
  """The beginning of a program that compiles for a GPU.

  It defines `device`, and `array(shape, dtype)` for what lies there.
  """
  return f"""
import jax
from jax.experimental import topologies

TARGET = '''gpu_device_info {{ threads_per_block_limit: 1024
threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048
core_count: {processors} fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
l2_cache_size: {l2_bytes} clock_rate_ghz: {clock_ghz}
device_memory_size: {memory_bytes}
shared_memory_per_block_optin: 232448
cuda_compute_capability {{ major: {capability}
feature_extension: ACCELERATED_FEATURES }} registers_per_core_limit: 65536
registers_per_block_limit: 65536 }} platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
'''
device = topologies.get_topology_desc(
  platform="cuda", topology_name="{name}", topology="1x1x1",
  target_config=TARGET,
).devices[0]

def array(shape, dtype):
  sharding = jax.sharding.SingleDeviceSharding(device)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
"""
