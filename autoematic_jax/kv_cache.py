"""The packed key / value cache of a batch of requests."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax.kv_codecs import Codec
from autoematic_jax.kv_codecs import Planes

BLOCK = 128
"""Capacity is a whole number of blocks; attention sums block by block."""


class Cache(abc.ABC):
  """What a layer needs of a cache, however its tokens are laid out."""

  @abc.abstractmethod
  def write(
    self,
    layer: Int[Array, ""],
    start: Int[Array, "B"],
    keys: Float[Array, "B H T D"],
    values: Float[Array, "B H T D"],
    levels: Int[Array, "B"],
  ) -> "Cache":
    """Packs new tokens and stores them from position `start` on."""

  @abc.abstractmethod
  def read(
    self, layer: Int[Array, ""]
  ) -> tuple[Float[Array, "B H S D"], Float[Array, "B H S D"]]:
    """Keys and values of one layer by position, decoded to float32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache(Cache):
  """Keys (after rope) and values of every layer.

  Attributes:
    planes: Of the codec, `[L, B, 2 H, S, width]`: the keys' heads, then the
      values', so that one pass packs or unpacks both.
    codec: How a head's vector is packed.
    head_dim: Width of a head before packing.
  """

  planes: Planes
  codec: Codec = dataclasses.field(metadata={"static": True})
  head_dim: int = dataclasses.field(metadata={"static": True})

  @property
  def capacity(self) -> int:
    """Tokens that each request can hold."""
    return next(iter(self.planes.values())).shape[3]

  def write(
    self,
    layer: Int[Array, ""],
    start: Int[Array, "B"],
    keys: Float[Array, "B H T D"],
    values: Float[Array, "B H T D"],
    levels: Int[Array, "B"],
  ) -> "KVCache":
    """Packs new tokens and stores them at `start` of each request.

    Args:
      layer: Layer index.
      start: Position of the first new token of each request; `start + T` must
        not exceed the capacity.
      keys: New keys, after rope.
      values: New values.
      levels: Bits of each request at this layer (2 is stored as 4).

    Returns:
      The cache with the tokens in place.
    """
    packed = encode(self.codec, keys, values, levels)
    planes = {
      name: _store_plane(plane, packed[name], layer, start)
      for name, plane in self.planes.items()
    }
    return dataclasses.replace(self, planes=planes)

  def read(
    self, layer: Int[Array, ""]
  ) -> tuple[Float[Array, "B H S D"], Float[Array, "B H S D"]]:
    """Keys and values of one layer, decoded to float32."""
    sliced = {
      name: lax.dynamic_index_in_dim(plane, layer, 0, keepdims=False)
      for name, plane in self.planes.items()
    }
    return decode(self.codec, sliced, self.head_dim)


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
  lead = (num_layers, batch, 2 * num_kv_heads, block_capacity(capacity))
  planes = {
    name: jnp.zeros((*lead, width), dtype)
    for name, (width, dtype) in codec.planes(head_dim).items()
  }
  return KVCache(planes=planes, codec=codec, head_dim=head_dim)


def encode(
  codec: Codec,
  keys: Float[Array, "B H T D"],
  values: Float[Array, "B H T D"],
  levels: Int[Array, "B"],
) -> Planes:
  """Keys and values packed side by side, `[B, 2 H, T, width]` a plane."""
  joined = jnp.concatenate([keys, values], axis=1)
  token_levels = jnp.broadcast_to(levels[:, None, None], joined.shape[:3])
  return codec.encode(joined, token_levels.astype(jnp.int32))


def decode(
  codec: Codec, planes: Planes, head_dim: int
) -> tuple[Float[Array, "B H S D"], Float[Array, "B H S D"]]:
  """Undoes `encode`, up to rounding, to float32."""
  keys, values = jnp.split(codec.decode(planes, head_dim), 2, axis=1)
  return keys, values


def _store_plane(plane, packed, layer, start):
  for request in range(packed.shape[0]):
    plane = lax.dynamic_update_slice(
      plane,
      packed[request][None, None],
      (layer, request, 0, start[request], 0),
    )
  return plane
