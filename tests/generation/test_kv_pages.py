"""Pages against the plain cache, token by token and in pages at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax import kv_pages

LAYERS, HEADS, LENGTH = 2, 2, 128
LAYER = jnp.int32(1)
WRITE = jax.jit(lambda cache, *tokens: cache.write(*tokens))
READ = jax.jit(lambda cache: cache.read(LAYER))


class Twin:
  """The same tokens in a plain cache and in pages, of two requests."""

  def __init__(self, codec, dim):
    self.plain = kv_cache.init_cache(
      num_layers=LAYERS,
      batch=2,
      num_kv_heads=HEADS,
      head_dim=dim,
      capacity=LENGTH,
      codec=codec,
    )
    planes, positions = kv_pages.init_pages(
      num_layers=LAYERS,
      num_pages=16,
      num_kv_heads=HEADS,
      head_dim=dim,
      codec=codec,
    )
    # Pages come in any order.
    pages = np.random.default_rng(0).permutation(np.arange(1, 13)).reshape(2, 6)
    self.tables = kv_pages.BlockTables(
      base=jnp.asarray(np.stack([pages[:, :2]] * LAYERS), jnp.int32),
      refined=jnp.asarray(np.stack([pages[:, 2:]] * LAYERS), jnp.int32),
      stored=jnp.zeros((LAYERS, 2, 2), jnp.int32),
      new=jnp.zeros((2,), jnp.int32),
    )
    self.paged = kv_pages.PagedCache(
      planes=planes,
      positions=positions,
      tables=self.tables,
      codec=codec,
      head_dim=dim,
    )
    self.rng = np.random.default_rng(1)
    self.dim = dim

  def write(self, start, count, levels):
    """Stores `count` tokens, of which the second request's last is padding."""
    shape = (2, HEADS, count, self.dim)
    keys, values = (
      jnp.asarray(self.rng.standard_normal(shape), jnp.float32)
      for _ in range(2)
    )
    new = jnp.asarray([count, max(count - 1, 1)], jnp.int32)
    tables = dataclasses.replace(self.paged.tables, new=new)
    self.paged = dataclasses.replace(self.paged, tables=tables)
    arguments = (
      LAYER,
      jnp.asarray(start, jnp.int32),
      keys,
      values,
      jnp.asarray(levels, jnp.int32),
    )
    self.plain = WRITE(self.plain, *arguments)
    self.paged = WRITE(self.paged, *arguments)

  def check(self, lengths):
    for plain, paged in zip(READ(self.plain), READ(self.paged), strict=True):
      for row, length in enumerate(lengths):
        np.testing.assert_array_equal(
          plain[row, :, :length], paged[row, :, :length]
        )


AUTOFP = kv_codecs.AutoFPCodec()


@pytest.mark.parametrize(
  ("codec", "dim"),
  [
    (AUTOFP, 24),
    (kv_codecs.FP6gCodec(), 24),
    (kv_codecs.DenseCodec("bfloat16"), 16),
  ],
)
def test_pages_hold_what_the_plain_cache_holds(codec, dim):
  for prompt_levels in [(4, 6), (6, 6), (2, 4)]:
    twin = Twin(codec, dim)
    twin.write([0, 0], 32, prompt_levels)
    lengths = np.array([32, 31])
    twin.check(lengths)
    for levels in [(6, 6), (4, 8), (2, 6), (6, 4), (8, 2), (4, 4)]:
      twin.write(lengths, 1, levels)
      lengths += 1
    twin.check(lengths)


def test_both_kinds_of_pages_take_as_many_bytes():
  """64 tokens of half a byte an element are 32 of a byte."""
  planes, _ = kv_pages.init_pages(
    num_layers=1, num_pages=3, num_kv_heads=1, head_dim=64, codec=AUTOFP
  )
  assert planes["codes"].shape == (1, 3, 2, 32 * 64)
  assert planes["scales"].shape == (1, 3, 2, 64 * 4)
