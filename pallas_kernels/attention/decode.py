"""One new token of each request over its packed keys and values.

A first kernel norms and turns queries and keys, and packs the new keys and
values into the cache. Of a second one, blocks take a chunk of one head's keys
each, for all query heads that share it, and leave sums that belong together by
their largest score, which a third one adds. Keys and values are decoded in
registers, and nothing of the cache is written out.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.attention.heads import HeadNorms

HEAD_WIDTHS = (64, 128, 256)
"""Packed widths of a head that the kernel takes."""

THREADS = 128
_TURN = 128
"""Keys that the warps of a block take together, at most."""

_MAX_CHUNKS = 32
_MAX_GROUP = 8
_BLOCKS = 528
"""Four for each multiprocessor of an H100 or H200."""


def chunk_size(capacity: int, pairs: int) -> int:
  """Keys of one block, so that blocks are enough for the device.

  Args:
    capacity: Keys of a request.
    pairs: Requests times key heads.
  """
  chunks = min(_MAX_CHUNKS, -(-_BLOCKS // pairs))
  return -(-capacity // (chunks * _TURN)) * _TURN


def takes(dim: int, width: int, group: int) -> bool:
  """Whether the kernels take heads so wide, of which so many share a key.

  Args:
    dim: Of a head.
    width: Of a packed head.
    group: Query heads of a key head.
  """
  return dim % 8 == 0 and width in HEAD_WIDTHS and group <= _MAX_GROUP


def step(
  joined: Float[Array, "B J"],
  rope: tuple[Float[Array, "B F"], Float[Array, "B F"]],
  norms: HeadNorms | None,
  codes: UInt8[Array, "L B C S W"],
  scales: UInt8[Array, "L B C S G"],
  positions: Int[Array, "B"],
  levels: Int[Array, "B"],
  layer: Int[Array, ""],
  *,
  config: ActivationConfig,
) -> tuple[
  Float[Array, "B A"], UInt8[Array, "L B C S W"], UInt8[Array, "L B C S G"]
]:
  """All of a layer's attention but its projections, for one new token.

  Args:
    joined: Heads of queries, of keys, and of values, side by side.
    rope: Cosines and sines of each request's position.
    norms: Of queries and keys, where there are such.
    codes: E2M5 bytes of the cache: the keys' heads, then the values'. Written
      in place where the caller gives them up.
    scales: One E4M3 byte for each 16 of them.
    positions: Of each new token, where its key and value go.
    levels: 4 or 6, of each request's key and value.
    layer: Which layer.
    config: Step of the offsets of keys and values.

  Returns:
    Weighted values of all heads, float32; codes; scales.

  Raises:
    PrecisionError: The heads' width, or how many share a key, is not one that
      the kernels take.
  """
  dim, kv_heads = 2 * rope[0].shape[1], codes.shape[2] // 2
  heads = joined.shape[1] // dim - 2 * kv_heads
  _check(dim, codes.shape[4], heads // kv_heads)
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.attention import prepare_sm90

  layer = layer.reshape(1)
  queries, codes, scales = prepare_sm90.prepare(
    joined, rope, norms, codes, scales, positions, levels, layer, config=config
  )
  out = _over_cache(queries, codes, scales, positions, layer)[..., :dim]
  return out.reshape(len(out), -1), codes, scales


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
  dim, width = queries.shape[2], codes.shape[4]
  _check(dim, width, queries.shape[1] // (codes.shape[2] // 2))
  scaled = queries.astype(jnp.float32) * dim**-0.5
  scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, width - dim)))
  layer = layer.reshape(1)
  return _over_cache(scaled, codes, scales, positions, layer)[..., :dim]


def _check(dim, width, group):
  if not takes(dim, width, group):
    raise PrecisionError(
      f"heads are {dim} wide, {width} packed, and {group} query heads share a"
      f" key; the kernels take multiples of 8, packed to {HEAD_WIDTHS}, and up"
      f" to {_MAX_GROUP} heads"
    )


def _over_cache(queries, codes, scales, positions, layer):
  """Of scaled and padded queries `[B, H, W]`."""
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.attention import decode_sm90
  from autoematic_jax.pallas_kernels.attention import join_sm90

  batch, heads, width = queries.shape
  kv_heads = codes.shape[2] // 2
  grouped = queries.reshape(batch * kv_heads, heads // kv_heads, width)
  parts = decode_sm90.partial_sums(grouped, codes, scales, positions, layer)
  return join_sm90.join(*parts).reshape(batch, heads, width)
