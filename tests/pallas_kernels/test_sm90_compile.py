"""The Hopper kernels compile for sm_90a where there is no GPU."""

import re
import subprocess
import sys

import pytest
from ahead_of_time import device
from ahead_of_time import missing

DEVICE = device(
  "NVIDIA H200",
  capability=9,
  processors=132,
  bandwidth=4800000000000,
  l2_bytes=52428800,
  clock_ghz=1.98,
  memory_bytes=151397597184,
)
COMPILE = (
  DEVICE
  + """
import dataclasses, os, sys
import jax, jax.numpy as jnp
from functools import partial
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig
)
from autoematic_jax.pallas_kernels import attention
from autoematic_jax.pallas_kernels.extended_gemm import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm import Gate, Norm
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import launch, quantize
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import StreamTile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import WgmmaTile

kind, mode, m = sys.argv[1], sys.argv[2], int(sys.argv[3])
stream = dict(tiles=2, row_warps=4, column_warps=2, splits=2, depth=3)
wgmma = dict(row_warps=8, splits=2, depth=3)
tiles = {
  "stream": StreamTile(**stream),
  "cluster": StreamTile(**stream, cluster=2),
  "alone": StreamTile(**stream | dict(tiles=1, row_warps=16, column_warps=1)),
  "wgmma": WgmmaTile(**wgmma, group=2),
  "wgmma cluster": WgmmaTile(**wgmma, group=4, cluster=2),
}
# Other kinds take the numbers of any.
tile = tiles.get(kind, tiles["stream"])
n, steps, slices, side = 512, 8, tile.slices, tile.tiles
blocks = n // (16 * side)
weight = FragmentWeight(
  units=array((2, blocks, steps * slices, side, 144), jnp.uint32),
  offsets=None if mode == "4" else array(
    (2, blocks, slices, side * (2 * 32 + 3 * 16)), jnp.uint32
  ),
  sources=array((2, steps * slices * 16), jnp.int32),
  tensor_scale=array((2, n), jnp.float32),
  mask=array((2, steps * slices * 16), jnp.bool_),
  format="nvfp4" if mode == "4" else "autofp6", decoding="exponent",
  inputs=64 * steps * slices, rows=n, max_rows=64, tiles=side, slices=slices,
  doubles=0 if mode == "4" else 2, singles=0 if mode == "4" else 3,
)
x = array((m, 64 * steps * slices), jnp.float16)
levels = array((m,), jnp.int32)
if kind == "attend":
  width = int(mode)
  x = array((m, (8 + 4) * width), jnp.float32)
  weight, scale = (
    array((2, m, 4, 1152, size), jnp.uint8) for size in (width, width // 16)
  )
  layer = array((), jnp.int32)

  def run(x, codes, scales, positions, layer):
    cos, norms = jnp.ones((m, width // 2)), jnp.ones((2, width))
    norms = attention.HeadNorms(query=norms, key=norms, epsilon=1e-6)
    return attention.step(
      x, (cos, cos), norms, codes, scales, positions, positions, layer,
      config=ActivationConfig(),
    )
elif kind == "quantize":
  columns = 64 * steps * slices
  before = {"4": None, "norm": Norm(
    scale=array((2, columns), jnp.float32), epsilon=1e-5
  ), "gate": Gate()}[mode]
  x = array((m, columns * (2 if mode == "gate" else 1)), jnp.float32)
  scale, layer = before, array((), jnp.int32)

  def run(x, weight, before, levels, layer):
    return quantize.quantize_in_order(
      x, levels, weight.sources, layer, config=ActivationConfig(),
      refine=True, before=before,
    )
elif kind == "unpack":
  run = partial(launch.many_rows_gemm, mode=mode)
  scale, layer = array((m, 1), jnp.float32), array((), jnp.int32)
else:
  tiles = {mode: tile}
  if mode == "any":
    deeper = dataclasses.replace(tile, depth=tile.depth + 1)
    tiles = {"4": deeper, "6": tile, "mixed": tile}
  run = partial(launch.decode_gemm, tiles=tiles)
  scale, layer = array((m,), jnp.float32), array((1,), jnp.int32)
# Mosaic takes the architecture of the default device.
with jax.default_device(device):
  traced = jax.jit(run).trace(x, weight, scale, levels, layer)
  traced.lower(lowering_platforms=("cuda",)).compile()
"""
)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
  ("kind", "mode", "m", "instruction"),
  [
    ("stream", "4", 16, "HMMA"),
    ("stream", "6", 3, "HMMA"),
    ("cluster", "mixed", 16, "HMMA"),
    ("alone", "mixed", 64, "HMMA"),
    ("stream", "any", 16, "HMMA"),
    ("cluster", "any", 1, "HMMA"),
    ("wgmma", "4", 64, "HGMMA"),
    ("wgmma", "6", 32, "HGMMA"),
    ("wgmma cluster", "6", 64, "HGMMA"),
    ("unpack", "4", 300, "STG.E.128"),
    ("unpack", "6", 300, "STG.E.128"),
    ("unpack", "mixed", 300, "STG.E.64"),
    ("attend", "64", 3, "MOVM.16.MT88"),
    ("attend", "128", 1, "HMMA"),
    ("attend", "256", 1, "HMMA"),
    ("quantize", "4", 5, "STG.E.64"),
    ("quantize", "norm", 5, "MUFU.RSQ"),
    ("quantize", "gate", 5, "MUFU.EX2"),
  ],
)
def test_compiles_for_hopper(tmp_path, monkeypatch, kind, mode, m, instruction):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
  # One architecture a process.
  subprocess.run(
    [sys.executable, "-c", COMPILE, kind, mode, str(m)], check=True
  )
  ptxas = "".join(path.read_text() for path in tmp_path.glob("*.ptxas"))
  spilled = re.findall(r"(\d+) bytes spill", ptxas)
  assert spilled
  assert set(spilled) == {"0"}
  assert "serialized" not in ptxas
  sass = "".join(path.read_text() for path in tmp_path.glob("*.sass*"))
  assert re.search(rf"\b{instruction}\b", sass)
