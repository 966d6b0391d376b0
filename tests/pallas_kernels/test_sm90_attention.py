"""The decode attention kernel, its threads run on numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
import simt
from packed_cache import LAYER
from packed_cache import filled

from autoematic_jax.errors import PrecisionError
from autoematic_jax.models import attention as reference
from autoematic_jax.pallas_kernels import attention
from autoematic_jax.pallas_kernels.attention import decode
from autoematic_jax.pallas_kernels.attention import decode_sm90
from autoematic_jax.pallas_kernels.attention import join_sm90
from autoematic_jax.pallas_kernels.sm90 import operands as operands_of


def run(monkeypatch, queries, cache, positions):
  batch, heads, dim = queries.shape
  codes, scales = (np.asarray(cache.planes[n]) for n in ("codes", "scales"))
  plan = decode_sm90.Plan(
    batch=batch,
    kv_heads=codes.shape[2] // 2,
    group=heads // (codes.shape[2] // 2),
    capacity=codes.shape[3],
    width=codes.shape[4],
  )
  grouped = queries.reshape(-1, plan.group, dim) * dim**-0.5
  grouped = np.pad(grouped, ((0, 0), (0, 0), (0, plan.width - dim)))
  lead = (batch * plan.kv_heads, plan.chunks, plan.group)
  operands = {
    "queries": grouped.astype(np.float32),
    "codes": codes,
    "scales": scales,
    "positions": np.asarray(positions, np.int32),
    "layer": np.asarray([LAYER], np.int32),
    "sums": np.full((*lead, plan.width), np.nan, np.float32),
    "largest": np.full(lead, np.nan, np.float32),
    "norm": np.full(lead, np.nan, np.float32),
  }
  machine = simt.Machine(
    operands.values(),
    blocks=plan.blocks,
    threads=decode.THREADS,
    shared_words=plan.shared_words,
  )
  with simt.replaced(monkeypatch, machine, decode_sm90, operands_of):
    decode_sm90.Body(plan, tuple(operands), *machine.refs).emit()
  out = joined(monkeypatch, *machine.arrays[-3:])
  return out.reshape(batch, heads, plan.width)[..., :dim]


def joined(monkeypatch, sums, largest, norm):
  count, chunks, group, width = sums.shape
  plan = join_sm90.Plan(count=count, chunks=chunks, group=group, width=width)
  out = np.full((count, group, width), np.nan, np.float32)
  operands = {"sums": sums, "largest": largest, "norm": norm, "out": out}
  machine = simt.Machine(
    operands.values(), blocks=plan.blocks, threads=join_sm90.THREADS
  )
  with simt.replaced(monkeypatch, machine, join_sm90, operands_of):
    join_sm90.Body(plan, tuple(operands), *machine.refs).emit()
  return machine.arrays[-1]


@pytest.mark.parametrize(
  ("dim", "group", "capacity"),
  [(128, 4, 256), (64, 1, 384), (250, 3, 128), (128, 8, 4224)],
)
def test_threads_give_what_attention_over_the_cache_gives(
  monkeypatch, dim, group, capacity
):
  rng = np.random.default_rng(dim)
  cache = filled(rng, 3, 2, capacity, dim)
  queries = 2 * rng.standard_normal((3, 2 * group, dim)).astype(np.float32)
  positions = jnp.asarray([0, capacity // 2 + 3, capacity - 1], jnp.int32)
  keys, values = cache.read(jnp.asarray(LAYER))
  wanted = reference.attend(
    jnp.asarray(queries)[:, None], keys, values, positions[:, None]
  )[:, 0]
  actual = run(monkeypatch, queries, cache, positions)
  np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=2e-5)


def test_chunks_cover_every_key():
  for capacity in (128, 1152, 33024, 131072):
    for width in attention.HEAD_WIDTHS:
      chunk = decode.chunk_size(capacity, width)
      assert chunk % (decode.THREADS * 64 // width) == 0
      assert -(-capacity // chunk) <= 32


@pytest.mark.parametrize(
  ("width", "heads", "message"), [(80, 2, "80 wide"), (64, 18, "9 query heads")]
)
def test_other_shapes_are_named(width, heads, message):
  with pytest.raises(PrecisionError, match=message):
    attention.attend(
      jnp.zeros((1, heads, width)),
      jnp.zeros((1, 1, 4, 128, width), jnp.uint8),
      jnp.zeros((1, 1, 4, 128, width // 16), jnp.uint8),
      jnp.zeros((1,), jnp.int32),
      jnp.asarray(0),
    )
