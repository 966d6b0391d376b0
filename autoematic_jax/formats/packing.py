"""Constants of the group structure and packing of small codes into bytes."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt8

GROUP = 16
SUBGROUP = 4
SUBGROUPS_PER_GROUP = GROUP // SUBGROUP
MAX_REFINED_PER_GROUP = 2


def pack_nibbles(codes: UInt8[Array, "*B K"]) -> UInt8[Array, "*B K2"]:
  """Packs 4-bit codes two a byte, the even element in the low nibble.

  Args:
    codes: Values below 16; K is even.

  Returns:
    `[..., K / 2]` bytes.
  """
  return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: UInt8[Array, "*B K2"]) -> UInt8[Array, "*B K"]:
  """Undoes `pack_nibbles`."""
  pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
  return pairs.reshape(*packed.shape[:-1], -1)


def pack_pairs(codes: UInt8[Array, "*B K"]) -> UInt8[Array, "*B K4"]:
  """Packs 2-bit codes four a byte, element i in bits 2i and 2i + 1."""
  quads = codes.reshape(*codes.shape[:-1], -1, 4)
  return (
    quads[..., 0]
    | (quads[..., 1] << 2)
    | (quads[..., 2] << 4)
    | (quads[..., 3] << 6)
  )


def unpack_pairs(packed: UInt8[Array, "*B K4"]) -> UInt8[Array, "*B K"]:
  """Undoes `pack_pairs`."""
  quads = jnp.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
  return quads.reshape(*packed.shape[:-1], -1)


def pack_sextets(codes: UInt8[Array, "*B K"]) -> UInt8[Array, "*B K34"]:
  """Packs 6-bit codes, four in three bytes, little-endian bit order."""
  quads = codes.reshape(*codes.shape[:-1], -1, 4)
  a, b, c, d = (quads[..., i] for i in range(4))
  packed = jnp.stack(
    [a | (b << 6), (b >> 2) | (c << 4), (c >> 4) | (d << 2)], axis=-1
  )
  return packed.reshape(*codes.shape[:-1], -1)


def unpack_sextets(packed: UInt8[Array, "*B K34"]) -> UInt8[Array, "*B K"]:
  """Undoes `pack_sextets`."""
  triples = packed.reshape(*packed.shape[:-1], -1, 3)
  a, b, c = (triples[..., i] for i in range(3))
  quads = jnp.stack(
    [
      a & 63,
      ((a >> 6) | (b << 2)) & 63,
      ((b >> 4) | (c << 4)) & 63,
      c >> 2,
    ],
    axis=-1,
  )
  return quads.reshape(*packed.shape[:-1], -1)


def pack_mask(mask: Bool[Array, "*B S"]) -> UInt8[Array, "*B G2"]:
  """Packs subgroup flags: bit i of a nibble is subgroup i of a group.

  Two groups share a byte, the even group in the low nibble; an odd number of
  groups leaves the last high nibble 0.
  """
  groups = mask.reshape(*mask.shape[:-1], -1, SUBGROUPS_PER_GROUP)
  if groups.shape[-2] % 2:
    pad = [(0, 0)] * (groups.ndim - 2) + [(0, 1), (0, 0)]
    groups = jnp.pad(groups, pad)
  weights = jnp.asarray([1, 2, 4, 8], jnp.uint8)
  nibbles = jnp.sum(
    groups.astype(jnp.uint8) * weights, axis=-1, dtype=jnp.uint8
  )
  return pack_nibbles(nibbles)


def unpack_mask(
  packed: UInt8[Array, "*B G2"], subgroups: int
) -> Bool[Array, "*B S"]:
  """Undoes `pack_mask` for a known number of subgroups."""
  nibbles = unpack_nibbles(packed)
  bits = jnp.stack([(nibbles >> i) & 1 for i in range(4)], axis=-1)
  return bits.reshape(*packed.shape[:-1], -1)[..., :subgroups].astype(bool)
