"""The decode attention kernel, its threads run on numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simt
from packed_cache import LAYER
from packed_cache import LAYERS
from packed_cache import filled

from autoematic_jax.errors import PrecisionError
from autoematic_jax.kv_codecs import AutoFPCodec
from autoematic_jax.models import attention as reference
from autoematic_jax.pallas_kernels import attention
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.attention import decode
from autoematic_jax.pallas_kernels.attention import decode_sm90
from autoematic_jax.pallas_kernels.attention import join_sm90
from autoematic_jax.pallas_kernels.attention import pack
from autoematic_jax.pallas_kernels.attention import prepare_sm90
from autoematic_jax.pallas_kernels.extended_gemm import rms_norm
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode as packed
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
  modules = (decode_sm90, packed, operands_of)
  with simt.replaced(monkeypatch, machine, *modules):
    decode_sm90.Body(plan, tuple(operands), *machine.refs).emit()
  out = joined(monkeypatch, *machine.arrays[-3:])
  return out.reshape(batch, heads, plan.width)[..., :dim]


def prepared(monkeypatch, joined, rope, norms, cache, positions, levels):
  """Queries and planes as the kernel that comes first leaves them."""
  codes, scales = (
    np.array(cache.planes[n], copy=True) for n in ("codes", "scales")
  )
  plan = prepare_sm90.Plan(
    batch=joined.shape[0],
    heads=joined.shape[1] // cache.head_dim - codes.shape[2],
    kv_heads=codes.shape[2] // 2,
    dim=cache.head_dim,
    width=codes.shape[4],
    capacity=codes.shape[3],
    epsilon=None if norms is None else norms.epsilon,
    config=ActivationConfig(),
  )
  operands = {
    "joined": joined,
    "cos": np.asarray(rope[0]),
    "sin": np.asarray(rope[1]),
    "positions": np.asarray(positions, np.int32),
    "levels": np.asarray(levels, np.int32),
    "layer": np.asarray([LAYER], np.int32),
  }
  if norms is not None:
    operands["query_norm"] = np.asarray(norms.query)
    operands["key_norm"] = np.asarray(norms.key)
  operands |= {"codes": codes, "scales": scales}
  shape = (plan.batch, plan.heads, plan.width)
  operands["queries"] = np.full(shape, np.nan, np.float32)
  machine = simt.Machine(
    operands.values(), blocks=plan.blocks, threads=prepare_sm90.THREADS
  )
  with (
    simt.replaced(monkeypatch, machine, prepare_sm90, operands_of),
    jax.disable_jit(),
  ):
    prepare_sm90.Body(plan, tuple(operands), *machine.refs).emit()
  return machine.arrays[-1], machine.arrays[-3], machine.arrays[-2]


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


@pytest.mark.slow
@pytest.mark.parametrize(
  ("dim", "group", "capacity"),
  [(128, 4, 256), (64, 1, 384), (248, 3, 128), (128, 8, 4224)],
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ("dim", "heads", "kv_heads", "normed"),
  [(128, 4, 2, True), (64, 3, 3, False), (248, 2, 1, True)],
)
def test_threads_prepare_as_the_model_does(
  monkeypatch, dim, heads, kv_heads, normed
):
  rng = np.random.default_rng(dim)
  batch = 3
  cache = filled(rng, batch, kv_heads, 128, dim)
  parts = rng.standard_t(3, (batch, heads + 2 * kv_heads, dim))
  # A head of zeros, one that is far over the scale's range.
  parts[0, heads], parts[1, -1] = 0, 1e5 * parts[1, -1]
  parts = parts.astype(np.float32)
  positions = np.asarray([0, 77, 127], np.int32)
  levels = np.asarray([4, 6, 6], np.int32)
  frequencies = 1e4 ** -(np.arange(0, dim, 2) / dim).astype(np.float32)
  rope = reference.rope_tables(jnp.asarray(positions)[:, None], frequencies)
  norms, turned = None, jnp.asarray(parts[:, : heads + kv_heads])
  if normed:
    scales = rng.lognormal(0, 1, (2, LAYERS, dim)).astype(np.float32)
    norms = attention.HeadNorms(
      query=jnp.asarray(scales[0]), key=jnp.asarray(scales[1]), epsilon=1e-6
    )
    of_head = np.repeat(scales[:, LAYER], [heads, kv_heads], axis=0)
    turned = rms_norm(turned, jnp.asarray(of_head), 1e-6)
  turned = reference.apply_rope(turned[:, None], rope)[:, 0]
  queries, codes, scales = prepared(
    monkeypatch,
    parts.reshape(batch, -1),
    [table[:, 0] for table in rope],
    norms,
    cache,
    positions,
    levels,
  )
  wanted = np.asarray(turned[:, :heads]) * dim**-0.5
  np.testing.assert_allclose(queries[..., :dim], wanted, rtol=1e-5, atol=1e-6)
  assert not queries[..., dim:].any()
  stored = cache.write(
    jnp.asarray(LAYER),
    jnp.asarray(positions),
    turned[:, heads:, None],
    jnp.asarray(parts[:, heads + kv_heads :, None]),
    jnp.asarray(levels),
  )
  # A turned key's last bit may take an element to the other side of a middle.
  for name, plane in (("codes", codes), ("scales", scales)):
    assert (plane == np.asarray(stored.planes[name])).mean() > 0.9999
  values = np.asarray(stored.planes["codes"])[:, :, kv_heads:]
  np.testing.assert_array_equal(codes[:, :, kv_heads:], values)


def test_elements_and_scales_are_packed_as_by_the_codec():
  rng = np.random.default_rng(0)
  x = rng.standard_t(2, (512, 16)) * rng.lognormal(0, 6, (512, 1))
  x[0], x[1, 3], x[2] = 0, np.nan, np.round(4 * x[2]) / 4
  x = jnp.asarray(x, jnp.float32)
  for bits in (4, 6):
    planes = AutoFPCodec().encode(x, jnp.full((512,), bits))
    amax = jnp.max(jnp.abs(x), axis=1)
    six = jnp.full((512,), bits == 6)
    for n in range(4):
      some = [x[:, 4 * n + m] for m in range(4)]
      word, scale = pack.packed(some, amax, six, ActivationConfig())
      word = np.asarray(word).view(np.uint8).reshape(512, 4)
      whole = np.arange(512) != 1
      wanted = np.asarray(planes["codes"])[:, 4 * n : 4 * n + 4]
      np.testing.assert_array_equal(word[whole], wanted[whole])
      np.testing.assert_array_equal(scale, planes["scales"][:, 0])


def test_chunks_cover_every_key():
  for capacity in (128, 1152, 33024, 131072):
    for pairs in (1, 8, 256, 1024):
      chunk = decode.chunk_size(capacity, pairs)
      assert chunk % 128 == 0
      chunks = -(-capacity // chunk)
      assert chunks <= 32
      # No more than are wanted to keep the device busy, but for rounding.
      assert chunks == 1 or pairs * chunks < 528 + pairs


@pytest.mark.parametrize(
  ("width", "heads", "message"),
  [(80, 2, "80 packed"), (60, 2, "60 wide"), (64, 18, "9 query heads")],
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
