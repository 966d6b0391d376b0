"""The Blackwell kernel compiles for sm_100a where there is no GPU."""

import re
import subprocess
import sys

import pytest
from ahead_of_time import device
from ahead_of_time import missing

DEVICE = device(
  "NVIDIA B200",
  capability=10,
  processors=148,
  bandwidth=7672320000000,
  l2_bytes=132644864,
  clock_ghz=1.965,
  memory_bytes=191514411008,
)
COMPILE = (
  DEVICE
  + """
import sys
from functools import partial
import jax, jax.numpy as jnp
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig
)
from autoematic_jax.pallas_kernels.extended_gemm import BlockScaledWeight
from autoematic_jax.pallas_kernels.extended_gemm import extended_gemm

level, m = int(sys.argv[1]), int(sys.argv[2])
layers, outputs, steps, stored = 3, 384, 6, 2
passes = 1 if level == 4 else 2
weight = BlockScaledWeight(
  codes=array((layers, outputs, 128 * (steps + stored)), jnp.uint8),
  scales=array(
    (layers, outputs // 128, 4 * steps * passes, 32, 16), jnp.float8_e4m3fn
  ),
  order=array((layers, 16 * steps), jnp.int32),
  tensor_scale=array((layers, outputs), jnp.float32),
  mask=array((layers, 64 * steps), jnp.bool_),
  format="nvfp4" if level == 4 else "autofp6", decoding="exponent",
  inputs=256 * steps, rows=outputs - 3, stored_tiles=stored,
)
run = partial(
  extended_gemm, present=(4, 6)[:passes], implementation="mosaic_sm100"
)
# Mosaic takes the architecture of the default device, and so does the check.
with jax.default_device(device):
  traced = jax.jit(run).trace(
    array((m, 256 * steps), jnp.float32), weight, array((m,), jnp.int32),
    layer=array((), jnp.int32),
  )
  program = traced.lower(lowering_platforms=("cuda",)).compile()
lines = program.as_text().splitlines()
print("\\n".join(line for line in lines if "(%weight_codes" in line))
"""
)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(("level", "m"), [(4, 3), (6, 300)])
def test_compiles_for_blackwell(tmp_path, monkeypatch, level, m):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
  # One architecture a process.
  done = subprocess.run(
    [sys.executable, "-c", COMPILE, str(level), str(m)],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  )

  def dumped(pattern):
    return "".join(path.read_text() for path in tmp_path.glob(pattern))

  ptxas = dumped("*.ptxas")
  assert "sm_100a" in ptxas
  assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill" in ptxas
  assert "mxf4nvf4.block_scale.scale_vec::4X" in dumped("*.ptx")
  sass = dumped("*.sass*")
  assert len(re.findall(r"\bUTCOMMA\.4X\b", sass)) == 4
  assert not re.search(r"\b(LDL|STL)\b", sass)
  # Nothing copies the weights or takes a layer of them on the way.
  (use,) = done.stdout.splitlines()
  assert re.search(r"= f4e2m1fn\[3,384,2048\]\S* bitcast\(", use)
