"""Packed keys and values in pages that requests take and give back.

A page of a layer holds either 64 tokens at 4 bits (a *base page*: E2M1 codes,
two a byte) or 32 tokens at more (a *refined page*: the one-byte codes of
`kv_codecs`), in as many bytes. A request's tokens of one layer may lie in both
kinds, each kind filled in order of position. This is the plain form that any
later kernel is compared with: it brings the tokens into order of position, so
that attention over pages has the bits of attention over `kv_cache.KVCache`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import kv_cache
from autoematic_jax.kv_codecs import AutoFPCodec
from autoematic_jax.kv_codecs import Codec
from autoematic_jax.kv_codecs import Planes

BASE_TOKENS = 64
REFINED_TOKENS = 32
REFINED_LEVEL = 6
"""Bits from which a token needs a refined page."""

NO_PAGE = 0
"""A page that belongs to nobody; what is not to be kept is written there."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTables:
  """Which pages the requests of a pass own, layer by layer.

  The pages that the pass may fill are in both tables already; `stored` says
  where it begins.

  Attributes:
    base: `[L, B, S / 64]` base pages in order, then NO_PAGE.
    refined: `[L, B, S / 32]` refined pages in order, then NO_PAGE.
    stored: `[L, B, 2]` tokens that lie in base and in refined pages.
    new: `[B]` tokens of each request in this pass, padding left out.
  """

  base: Int[Array | np.ndarray, "L B P"]
  refined: Int[Array | np.ndarray, "L B R"]
  stored: Int[Array | np.ndarray, "L B 2"]
  new: Int[Array | np.ndarray, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCache(kv_cache.Cache):
  """The pages of all layers, and the tables of the requests in this pass.

  Attributes:
    planes: Of the codec, `[L, N, 2 H, bytes]`: the keys' heads, then the
      values'. Where there are base pages, `codes` has room for 32 tokens of a
      byte an element or for 64 of half a byte, and `scales` for 64 tokens.
    positions: `[L, N, 64]` position of each token in its page; beyond the
      tokens that the tables count there may be anything.
    tables: The pages of each request.
    codec: How a head's vector is packed.
    head_dim: Width of a head before packing.
  """

  planes: Planes
  positions: Int[Array, "L N 64"]
  tables: BlockTables
  codec: Codec = dataclasses.field(metadata={"static": True})
  head_dim: int = dataclasses.field(metadata={"static": True})

  def write(
    self,
    layer: Int[Array, ""],
    start: Int[Array, "B"],
    keys: Float[Array, "B H T D"],
    values: Float[Array, "B H T D"],
    levels: Int[Array, "B"],
  ) -> "PagedCache":
    """Packs new tokens into pages of the kind that their level asks for.

    Several tokens of a request begin a page of their own: the stored tokens of
    both kinds are then whole pages, and T is a multiple of 32.
    """
    packed = kv_cache.encode(self.codec, keys, values, levels)
    refined = needs_refined(self.codec, levels)
    base, table, stored = self._layer_tables(layer)
    place = _place_token if keys.shape[2] == 1 else _place_pages
    stores = (self.planes, self.positions)
    for row in range(keys.shape[0]):
      target = _Target(
        layer=layer,
        start=start[row],
        refined=refined[row],
        base_pages=base[row],
        refined_pages=table[row],
        stored=stored[row],
        halves=has_base_pages(self.codec),
      )
      tokens = {name: plane[row] for name, plane in packed.items()}
      stores = place(*stores, tokens, target)
    planes, positions = stores
    counts = jnp.where(
      jnp.stack([~refined, refined], axis=-1), self.tables.new[:, None], 0
    )
    tables = dataclasses.replace(
      self.tables, stored=jnp.asarray(self.tables.stored).at[layer].add(counts)
    )
    return dataclasses.replace(
      self, planes=planes, positions=positions, tables=tables
    )

  def read(
    self, layer: Int[Array, ""]
  ) -> tuple[Float[Array, "B H S D"], Float[Array, "B H S D"]]:
    """Keys and values of one layer by position, decoded to float32."""
    base, refined, stored = self._layer_tables(layer)

    def only_refined():
      return _refined_tokens(self.planes, layer, refined, self._widths)

    if not has_base_pages(self.codec):
      ordered = only_refined()
    else:
      # Where a layer's tokens all lie in pages of one kind, those are in
      # order already.
      any_base, any_refined = jnp.any(stored[:, 0]), jnp.any(stored[:, 1])
      ordered = lax.switch(
        jnp.where(any_base, jnp.where(any_refined, 2, 1), 0),
        [
          only_refined,
          lambda: _base_tokens(self.planes, layer, base),
          lambda: self._sorted_tokens(layer, base, refined, stored),
        ],
      )
    return kv_cache.decode(self.codec, ordered, self.head_dim)

  @property
  def _widths(self) -> dict[str, int]:
    planes = self.codec.planes(self.head_dim)
    return {name: width for name, (width, _) in planes.items()}

  def _layer_tables(self, layer):
    tables = (self.tables.base, self.tables.refined, self.tables.stored)
    return [
      lax.dynamic_index_in_dim(table, layer, 0, keepdims=False)
      for table in tables
    ]

  def _sorted_tokens(self, layer, base, refined, stored):
    """Tokens of both kinds, ordered by their stored positions."""
    positions = lax.dynamic_index_in_dim(
      self.positions, layer, 0, keepdims=False
    )
    length = refined.shape[1] * REFINED_TOKENS
    batch = refined.shape[0]
    of_base = positions[base].reshape(batch, -1)
    of_refined = positions[refined][..., :REFINED_TOKENS].reshape(batch, -1)
    rank = jnp.arange(length)
    where = jnp.concatenate(
      [
        jnp.where(rank < stored[:, :1], of_base, length),
        jnp.where(rank < stored[:, 1:], of_refined, length),
      ],
      axis=1,
    )
    source = jnp.zeros((batch, length), jnp.int32)
    source = source.at[jnp.arange(batch)[:, None], where].set(
      jnp.arange(2 * length, dtype=jnp.int32), mode="drop"
    )
    kinds = (
      _base_tokens(self.planes, layer, base),
      _refined_tokens(self.planes, layer, refined, self._widths),
    )
    return {
      name: jnp.take_along_axis(
        jnp.concatenate([kind[name] for kind in kinds], axis=2),
        source[:, None, :, None],
        axis=2,
      )
      for name in self.planes
    }


def has_base_pages(codec: Codec) -> bool:
  """Whether a codec stores 4-bit tokens in half a byte an element."""
  return isinstance(codec, AutoFPCodec)


def needs_refined(codec: Codec, levels: Int[Array, "B"]) -> Array:
  """`[B]` whether tokens kept at these levels go to refined pages."""
  if not has_base_pages(codec):
    return jnp.ones(levels.shape, bool)
  return levels >= REFINED_LEVEL


def init_pages(
  *,
  num_layers: int,
  num_pages: int,
  num_kv_heads: int,
  head_dim: int,
  codec: Codec,
) -> tuple[Planes, Int[Array, "L N 64"]]:
  """Planes and positions of empty pages, NO_PAGE included."""
  lead = (num_layers, num_pages, 2 * num_kv_heads)
  planes = {}
  for name, (width, dtype) in codec.planes(head_dim).items():
    scales = has_base_pages(codec) and name == "scales"
    tokens = BASE_TOKENS if scales else REFINED_TOKENS
    planes[name] = jnp.zeros((*lead, tokens * width), dtype)
  positions = jnp.full((num_layers, num_pages, BASE_TOKENS), -1, jnp.int32)
  return planes, positions


def _halve(codes):
  """4-bit codes two a byte: `s e1 e0 m` are the upper bits of a byte code."""
  pairs = codes.reshape(*codes.shape[:-1], -1, 2)
  return (pairs[..., 0] >> 4) | (pairs[..., 1] & 0xF0)


def _expand(halves):
  """Undoes `_halve`."""
  pairs = jnp.stack([halves << 4, halves & 0xF0], axis=-1)
  return pairs.reshape(*halves.shape[:-1], -1)


class _Target(NamedTuple):
  """Where one request's new tokens of one layer go.

  Attributes:
    layer: Layer index.
    start: Position of the first.
    refined: Whether they go to refined pages.
    base_pages: The request's base pages.
    refined_pages: Its refined pages.
    stored: `[2]` tokens in each kind.
    halves: Whether base pages hold half a byte an element.
  """

  layer: Array
  start: Array
  refined: Array
  base_pages: Array
  refined_pages: Array
  stored: Array
  halves: bool


def _place_token(planes, positions, tokens, target):
  """Stores one token behind those of its kind."""
  rank = jnp.where(target.refined, target.stored[1], target.stored[0])
  size = jnp.where(target.refined, REFINED_TOKENS, BASE_TOKENS)
  page = jnp.where(
    target.refined,
    target.refined_pages[rank // REFINED_TOKENS],
    target.base_pages[rank // BASE_TOKENS],
  )
  offset = rank % size
  placed = {}
  for name, plane in planes.items():
    new = tokens[name][:, 0]
    slot = offset
    if name == "codes" and target.halves:
      # Two base tokens share the bytes of one refined token.
      slot = jnp.where(target.refined, offset, offset // 2)
      at = (target.layer, page, 0, slot * new.shape[-1])
      old = lax.dynamic_slice(plane, at, (1, 1, *new.shape))[0, 0]
      new = jnp.where(target.refined, new, _set_half(old, new, offset % 2))
    at = (target.layer, page, 0, slot * new.shape[-1])
    placed[name] = lax.dynamic_update_slice(plane, new[None, None], at)
  position = target.start.astype(jnp.int32)[None, None, None]
  at = (target.layer, page, offset)
  return placed, lax.dynamic_update_slice(positions, position, at)


def _set_half(old, new, which):
  """The bytes of two base tokens, one of them replaced by byte codes."""
  halves = old.reshape(old.shape[0], 2, -1)
  chosen = jnp.arange(2)[:, None] == which
  return jnp.where(chosen, _halve(new)[:, None], halves).reshape(old.shape)


def _place_pages(planes, positions, tokens, target):
  """Stores tokens in pages of their own, padding included."""
  count = next(iter(tokens.values())).shape[1] // REFINED_TOKENS
  full_base = -(-count * REFINED_TOKENS // BASE_TOKENS)
  first = target.stored // jnp.asarray([BASE_TOKENS, REFINED_TOKENS])
  for index in range(count):
    base_page = jnp.int32(NO_PAGE)
    if index < full_base:
      base_page = target.base_pages[first[0] + index]
    refined_page = target.refined_pages[first[1] + index]
    page = jnp.where(target.refined, refined_page, base_page)
    planes = {
      name: lax.dynamic_update_slice(
        plane,
        _page_content(plane, name, tokens[name], index, target)[None, None],
        (target.layer, page, 0, 0),
      )
      for name, plane in planes.items()
    }
    size = jnp.where(target.refined, REFINED_TOKENS, BASE_TOKENS)
    at = target.start + index * size + jnp.arange(BASE_TOKENS)
    positions = lax.dynamic_update_slice(
      positions, at.astype(jnp.int32)[None, None], (target.layer, page, 0)
    )
  return planes, positions


def _page_content(plane, name, tokens, index, target):
  """`[2 H, bytes]` of the page `index` of new tokens, whatever its kind."""
  width = plane.shape[-1]
  as_refined = _cut(tokens, index, REFINED_TOKENS, width)
  if not target.halves:
    return as_refined
  codes = _halve(tokens) if name == "codes" else tokens
  as_base = _cut(codes, index, BASE_TOKENS, width)
  return jnp.where(target.refined, as_refined, as_base)


def _cut(tokens, index, count, width):
  """Tokens of one page side by side, filled up to the page's width."""
  part = tokens[:, index * count : (index + 1) * count]
  flat = part.reshape(tokens.shape[0], -1)
  return jnp.pad(flat, ((0, 0), (0, width - flat.shape[-1])))


def _gather_pages(planes, layer, pages):
  """Pages `[B, P, 2 H, bytes]`: copied whole, where a gather goes by bytes."""

  def page(index):
    return {
      name: lax.dynamic_slice(
        plane, (layer, index, 0, 0), (1, 1, *plane.shape[2:])
      )[0, 0]
      for name, plane in planes.items()
    }

  out = lax.map(page, pages.reshape(-1))
  return {
    name: plane.reshape(*pages.shape, *plane.shape[1:])
    for name, plane in out.items()
  }


def _tokens(pages, tokens):
  """`[B, P, 2 H, tokens * width]` as `[B, 2 H, P * tokens, width]`."""
  batch, count, heads, _ = pages.shape
  split = pages.reshape(batch, count, heads, tokens, -1)
  return split.swapaxes(1, 2).reshape(batch, heads, count * tokens, -1)


def _refined_tokens(planes, layer, pages, widths):
  """All tokens of refined pages, a plane's tokens `widths[name]` wide."""
  gathered = _gather_pages(planes, layer, pages)
  return {
    name: _tokens(plane[..., : REFINED_TOKENS * widths[name]], REFINED_TOKENS)
    for name, plane in gathered.items()
  }


def _base_tokens(planes, layer, pages):
  """All tokens of base pages, as byte codes."""
  gathered = _gather_pages(planes, layer, pages)
  return {
    "codes": _expand(_tokens(gathered["codes"], BASE_TOKENS)),
    "scales": _tokens(gathered["scales"], BASE_TOKENS),
  }
