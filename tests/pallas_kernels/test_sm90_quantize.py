"""The kernel that quantizes rows, its threads run on numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import Gate
from autoematic_jax.pallas_kernels.extended_gemm import Norm
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import launch
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import quantize
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import permute_rows
from autoematic_jax.pallas_kernels.sm90 import operands as operands_of


def sources_of(rng, places):
  """Groups in any order, and their subgroups in any order inside."""
  groups = rng.permutation(places // 4)
  inside = rng.permuted(np.tile(np.arange(4), (places // 4, 1)), axis=1)
  return (4 * groups[:, None] + inside).reshape(-1).astype(np.int32)


def run(monkeypatch, x, levels, sources, layer, before, refine=True):
  gated, norm = isinstance(before, Gate), isinstance(before, Norm)
  rows, width = x.shape
  plan = quantize._Plan(
    rows=rows,
    columns=width // 2 if gated else width,
    places=sources.shape[1],
    config=ActivationConfig(),
    refine=refine,
    gated=gated,
    epsilon=before.epsilon if norm else None,
  )
  operands = {
    "x": x,
    "levels": levels.astype(np.int32),
    "sources": sources,
    "layer": np.asarray([layer], np.int32),
  }
  if norm:
    operands["norm"] = np.asarray(before.scale)
  operands["values"] = np.full((rows, 4 * plan.places), np.nan, np.float16)
  operands["scale"] = np.full((rows,), -1, np.float32)
  machine = simt.Machine(
    operands.values(),
    blocks=rows * plan.blocks,
    threads=quantize.THREADS,
    shared_words=2 * quantize.THREADS // 32,
  )
  with (
    simt.replaced(monkeypatch, machine, quantize, operands_of),
    jax.disable_jit(),
  ):
    quantize._Body(plan, tuple(operands), *machine.refs).emit()
  return machine.arrays[-2:]


def expected(x, levels, sources, layer, before):
  x = jnp.asarray(x)
  if before is not None:
    x = before(x, jnp.asarray(layer))
  rows = quantize_rows(
    x, jnp.asarray(levels, jnp.int32), config=ActivationConfig()
  )
  values = rows.scaled(rows.values + rows.delta).astype(jnp.float16)
  return (
    np.asarray(permute_rows(values, jnp.asarray(sources[layer]))),
    np.asarray(rows.tensor_scale[:, 0]),
  )


# More subgroups than a block has threads; a row whose last group is padding.
@pytest.mark.parametrize(("k", "places"), [(1120, 288), (80, 32)])
@pytest.mark.parametrize("kind", ["nothing", "norm", "gate"])
def test_threads_give_what_quantize_rows_gives(monkeypatch, k, places, kind):
  rng = np.random.default_rng(k)
  sources = np.stack([sources_of(rng, places) for _ in range(3)])
  x = rng.standard_t(3, (5, k * (2 if kind == "gate" else 1)))
  x = x.astype(np.float32)
  x[1], x[2, k // 3], x[3, 0] = 0, np.nan, np.inf
  before = None
  if kind == "norm":
    scale = rng.lognormal(0, 1, (3, k)).astype(np.float32)
    before = Norm(scale=jnp.asarray(scale), epsilon=1e-5)
  if kind == "gate":
    before = Gate()
  levels = np.asarray([6, 4, 6, 4, 4])
  values, scale = run(monkeypatch, x, levels, sources, 2, before)
  wanted, wanted_scale = expected(x, levels, sources, 2, before)
  whole = np.isfinite(wanted_scale)
  assert whole.tolist() == [True, True, False, False, True]
  np.testing.assert_allclose(scale, wanted_scale, rtol=1e-6)
  assert np.isfinite(values[whole]).all()
  equal = values[whole] == wanted[whole]
  # A norm's or gate's last bit may take a value to the other side of a middle.
  assert equal.mean() >= (1.0 if kind == "nothing" else 0.99)


def test_what_the_kernel_cannot_do_is_refused():
  sources, layer = jnp.arange(32)[None], jnp.asarray(0)
  apart = ActivationConfig(overlapping=False)
  for columns, config, message in (
    (128, apart, "masks apart"),
    (127, ActivationConfig(), "127 columns"),
  ):
    with pytest.raises(PrecisionError, match=message):
      quantize.quantize_in_order(
        jnp.ones((1, columns)),
        jnp.asarray([6]),
        sources,
        layer,
        config=config,
        refine=True,
      )


@pytest.mark.parametrize(
  ("levels", "mode"),
  [([4], "4"), ([6], "6"), ([4] * 5, "4"), ([6] * 16, "6"), ([4, 6], "mixed")],
)
def test_kernels_find_the_mode_of_their_rows(monkeypatch, levels, mode):
  machine = simt.Machine([np.asarray(levels, np.int32)], blocks=2, threads=64)
  with simt.replaced(monkeypatch, machine, launch):
    wanted = launch._wanted_mode(0, len(levels))
  assert np.unique(wanted).tolist() == [launch._MODES.index(mode)]
