"""The packed key / value cache of a batch of requests."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax.kv_codecs import Codec
from autoematic_jax.kv_codecs import Planes

BLOCK = 128
"""Capacity is a whole number of blocks; attention sums block by block."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
  """Keys (after rope) and values of every layer.

  Attributes:
    keys: Planes `[L, B, H, S, width]` of the codec.
    values: The same for values.
    codec: How a head's vector is packed.
    head_dim: Width of a head before packing.
  """

  keys: Planes
  values: Planes
  codec: Codec = dataclasses.field(metadata={"static": True})
  head_dim: int = dataclasses.field(metadata={"static": True})

  @property
  def capacity(self) -> int:
    """Tokens that each request can hold."""
    return next(iter(self.keys.values())).shape[3]


def block_capacity(tokens: int) -> int:
  """Smallest capacity, in whole blocks, that holds `tokens`."""
  return -(-tokens // BLOCK) * BLOCK


def init_cache(
    *,
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    codec: Codec,
) -> KVCache:
  """An empty cache for `batch` requests of up to `capacity` tokens."""
  lead = (num_layers, batch, num_kv_heads, block_capacity(capacity))
  planes = codec.planes(head_dim)

  def empty():
    return {
        name: jnp.zeros((*lead, width), dtype)
        for name, (width, dtype) in planes.items()
    }

  return KVCache(keys=empty(), values=empty(), codec=codec, head_dim=head_dim)


def write(
    cache: KVCache,
    layer: Int[Array, ""],
    start: Int[Array, "B"],
    keys: Float[Array, "B H T D"],
    values: Float[Array, "B H T D"],
    levels: Int[Array, "B"],
) -> KVCache:
  """Packs new tokens and stores them at `start` of each request.

  Args:
    cache: The cache; `start + T` must not exceed its capacity.
    layer: Layer index.
    start: Position of the first new token of each request.
    keys: New keys, after rope.
    values: New values.
    levels: Bits of each request at this layer (2 is stored as 4).

  Returns:
    The cache with the tokens in place.
  """
  token_levels = jnp.broadcast_to(
      levels[:, None, None], keys.shape[:3]
  ).astype(jnp.int32)

  def store(planes, x):
    packed = cache.codec.encode(x, token_levels)
    return {
        name: _store_plane(planes[name], packed[name], layer, start)
        for name in planes
    }

  return dataclasses.replace(
      cache,
      keys=store(cache.keys, keys),
      values=store(cache.values, values),
  )


def _store_plane(plane, packed, layer, start):
  for request in range(packed.shape[0]):
    plane = lax.dynamic_update_slice(
        plane,
        packed[request][None, None],
        (layer, request, 0, start[request], 0),
    )
  return plane


def read(
    cache: KVCache, layer: Int[Array, ""]
) -> tuple[Float[Array, "B H S D"], Float[Array, "B H S D"]]:
  """Keys and values of one layer, decoded to float32."""

  def load(planes):
    sliced = {
        name: lax.dynamic_index_in_dim(plane, layer, 0, keepdims=False)
        for name, plane in planes.items()
    }
    return cache.codec.decode(sliced, cache.head_dim)

  return load(cache.keys), load(cache.values)
