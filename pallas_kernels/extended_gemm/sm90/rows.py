"""Rows of x in the order in which a kernel reads them, by XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.pallas_kernels.extended_gemm.fragments import COLUMNS

ROW_TILE = 8
"""Rows of x that one mma takes."""


def permute_rows(
  x: Float[Array, "M K"], sources: Int[Array, "Q"]
) -> Float[Array, "M C"]:
  """Rows of x whose subgroups come from `sources`, zeros past K.

  Whoever writes x can do this for nothing; here it is a kernel of its own.
  """
  x = x.reshape(x.shape[0], -1, 4)
  x = jnp.take(x, sources, axis=1, mode="fill", fill_value=0)
  return x.reshape(x.shape[0], -1)


def stage_rows(x: Float[Array, "M C"], steps: int) -> Float[Array, "S R W"]:
  """Rows of x by steps of 64 columns, as wgmma reads them in shared memory.

  Columns follow the order in which an mma meets them; the eight 16-byte chunks
  of a row are swizzled by the row.
  """
  rows, columns = x.shape
  padded_rows = -(-rows // ROW_TILE) * ROW_TILE
  missing = steps * COLUMNS - columns
  x = jnp.pad(x, ((0, padded_rows - rows), (0, missing)))
  # step, group, word, half, b: a chunk is one word and half.
  x = x.reshape(padded_rows, steps, 4, 4, 2, 2).transpose(1, 0, 3, 4, 2, 5)
  x = x.reshape(steps, padded_rows // 8, 8, 8, 8)
  chunk = jnp.arange(8)[:, None] ^ jnp.arange(8)[None]
  x = jnp.take_along_axis(x, chunk[None, None, :, :, None], axis=3)
  return x.reshape(steps, padded_rows, COLUMNS)
