"""One new token of each request over its packed keys and values.

Blocks take a chunk of one head's keys each, for all query heads that share it,
and leave sums that belong together by their largest score, which a second
kernel adds. Keys and values are decoded in registers, and nothing of the cache
is written out.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from autoematic_jax.errors import PrecisionError

HEAD_WIDTHS = (64, 128, 256)
"""Packed widths of a head that the kernel takes."""

THREADS = 128
_MAX_CHUNKS = 32
_MAX_GROUP = 8


def chunk_size(capacity: int, width: int) -> int:
  """Keys of one block: enough blocks for the device, no more than 32.

  Args:
    capacity: Keys of a request.
    width: Of a packed head.
  """
  # Keys that the threads of a block look at together.
  turn = THREADS * 64 // width
  return -(-capacity // (_MAX_CHUNKS * turn)) * turn


def takes(width: int, group: int) -> bool:
  """Whether the kernel takes heads so wide, of which so many share a key.

  Args:
    width: Of a packed head.
    group: Query heads of a key head.
  """
  return width in HEAD_WIDTHS and group <= _MAX_GROUP


def attend(
  queries: Float[Array, "B H D"],
  codes: UInt8[Array, "L B C S W"],
  scales: UInt8[Array, "L B C S G"],
  positions: Int[Array, "B"],
  layer: Int[Array, ""],
) -> Float[Array, "B H D"]:
  """Attention of one token over E2M5 bytes and E4M3 scales.

  Args:
    queries: After rope.
    codes: Of the cache: the keys' heads, then the values'.
    scales: One for each 16 of them.
    positions: Of each new token, whose key is in the cache; it sees keys up to
      itself.
    layer: Which layer.

  Returns:
    Weighted values, float32.

  Raises:
    PrecisionError: The heads' width, or how many share a key, is not one that
      the kernel takes.
  """
  batch, heads, dim = queries.shape
  width, kv_heads = codes.shape[4], codes.shape[2] // 2
  group = heads // kv_heads
  if not takes(width, group):
    raise PrecisionError(
      f"heads are {width} wide packed and {group} query heads share a key; the"
      f" kernel takes widths of {HEAD_WIDTHS} and up to {_MAX_GROUP} heads"
    )
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.attention import decode_sm90
  from autoematic_jax.pallas_kernels.attention import join_sm90

  grouped = queries.reshape(batch * kv_heads, group, dim) * dim**-0.5
  missing = width - dim
  grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, missing)))
  parts = decode_sm90.partial_sums(
    grouped, codes, scales, positions, layer.reshape(1)
  )
  out = join_sm90.join(*parts)
  return out.reshape(batch, heads, width)[..., :dim]
