"""Packed keys and values against the formats they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax import formats
from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax.arithmetic import exact_divide


def vectors(shape, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * rng.lognormal(0, 2, (*shape[:-1], 1))
  return jnp.asarray(x, jnp.float32)


def expected_autofp(x, level, decoding, nearest_base):
  """Base and offsets by the formats' own functions, no packing."""
  width = -(-x.shape[-1] // 16) * 16
  padded = jnp.pad(x, ((0, 0), (0, width - x.shape[-1])))
  scale = formats.group_scale(padded, jnp.ones((x.shape[0], 1)))
  scale = jnp.repeat(scale, 16, axis=-1)
  scaled = exact_divide(padded, scale)
  base = formats.round_e2m1(scaled)
  delta = jnp.zeros_like(base)
  if level == 6:
    d = formats.offset(scaled, base, decoding)
    if not nearest_base:
      base, d = formats.nearest_pair(scaled, base, decoding)
    delta = formats.offset_delta(d, base, decoding)
  if level == 8:
    d = formats.offset8(scaled, base, "exponent")
    delta = formats.offset8_delta(d, base, "exponent")
  return ((base + delta) * scale)[:, : x.shape[-1]]


@pytest.mark.parametrize("decoding", ["exponent", "fixed"])
@pytest.mark.parametrize("nearest_base", [False, True])
@pytest.mark.parametrize("head_dim", [10, 64, 80])
def test_autofp_codec_is_exact(decoding, nearest_base, head_dim):
  codec = kv_codecs.AutoFPCodec(decoding, nearest_base)
  x = vectors((12, head_dim))
  levels = jnp.asarray([2, 4, 6, 8] * 3, jnp.int32)
  planes = jax.jit(codec.encode)(x, levels)
  decoded = jax.jit(codec.decode, static_argnums=1)(planes, head_dim)
  for row, level in enumerate(levels.tolist()):
    expected = expected_autofp(x[row : row + 1], level, decoding, nearest_base)
    np.testing.assert_array_equal(decoded[row : row + 1], expected)


def test_more_bits_come_closer():
  codec = kv_codecs.AutoFPCodec()
  x = vectors((64, 64))
  errors = []
  for level in (4, 6, 8):
    planes = codec.encode(x, jnp.full((64,), level, jnp.int32))
    error = (codec.decode(planes, 64) - x) / jnp.linalg.norm(
      x, axis=1, keepdims=True
    )
    errors.append(float(jnp.sum(error**2)))
  assert errors[2] < 0.2 * errors[1] < 0.2 * 0.3 * errors[0]


def test_fp6g_codec_is_exact():
  codec = kv_codecs.FP6gCodec()
  x = vectors((9, 64))
  planes = codec.encode(x, jnp.full((9,), 6, jnp.int32))
  scale = formats.group_scale(x, jnp.ones((9, 1)), 7.5)
  scale = jnp.repeat(scale, 16, axis=-1)
  expected = formats.round_e2m3(exact_divide(x, scale)) * scale
  np.testing.assert_array_equal(codec.decode(planes, 64), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_codec_rounds_to_its_dtype(dtype):
  codec = kv_codecs.DenseCodec(dtype)
  x = vectors((9, 64)).at[0, :4].set(jnp.array([jnp.nan, jnp.inf, -0.0, 1e-40]))
  planes = codec.encode(x, jnp.full((9,), 6, jnp.int32))
  expected = np.asarray(x.astype(dtype)).astype(np.float32)
  np.testing.assert_array_equal(codec.decode(planes, 64), expected)


@pytest.mark.parametrize(
  "codec",
  [
    kv_codecs.AutoFPCodec(),
    kv_codecs.FP6gCodec(),
    kv_codecs.DenseCodec(),
    kv_codecs.DenseCodec("bfloat16"),
  ],
)
def test_tokens_land_where_they_belong(codec):
  cache = kv_cache.init_cache(
    num_layers=2,
    batch=2,
    num_kv_heads=3,
    head_dim=16,
    capacity=130,
    codec=codec,
  )
  assert cache.capacity == 256
  keys, values = vectors((2, 3, 5, 16), 1), vectors((2, 3, 5, 16), 2)
  start = jnp.asarray([0, 7], jnp.int32)
  levels = jnp.asarray([6, 6], jnp.int32)
  cache = cache.write(jnp.int32(1), start, keys, values, levels)
  untouched, _ = cache.read(jnp.int32(0))
  assert not np.asarray(untouched).any()
  read = cache.read(jnp.int32(1))
  for stored, given in zip(read, (keys, values), strict=True):
    assert stored.shape == (2, 3, 256, 16)
    for request, first in enumerate((0, 7)):
      window = np.asarray(stored[request, :, first : first + 5])
      assert np.abs(window - given[request]).max() < 0.2 * np.abs(given).max()
      rest = np.delete(stored[request], np.s_[first : first + 5], axis=1)
      assert not rest.any()


def test_packed_bits_per_element():
  def bits(codec):
    planes = codec.planes(64)
    return sum(w * jnp.dtype(t).itemsize * 8 for w, t in planes.values()) / 64

  assert bits(kv_codecs.AutoFPCodec()) == 8.5
  assert bits(kv_codecs.DenseCodec()) == 32
  assert bits(kv_codecs.DenseCodec("bfloat16")) == 16
