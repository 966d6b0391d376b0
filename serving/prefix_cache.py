"""Whole chunks of prompts, kept for the next request that begins alike."""

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from autoematic_jax.page_pool import PagePool
from autoematic_jax.page_pool import PageTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
  pages: Int[np.ndarray, "L C"]
  refined: Bool[np.ndarray, "L"]


class PrefixCache:
  """Pages of chunks by the tokens up to their end and the precision.

  Holds an owner's share in each page. Chunks begin at multiples of their size
  and each was a prefill pass of its own, so a hit has the bits of a miss.

  Attributes:
    chunk: Tokens of a chunk.
  """

  def __init__(self, pool: PagePool, chunk: int):
    self.chunk = chunk
    self._pool = pool
    self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()

  def __len__(self) -> int:
    return len(self._chunks)

  def keys(self, tokens: Sequence[int], precision: bytes) -> list[bytes]:
    """A key for each whole chunk; the last token is always left to run."""
    keys, key = [], precision
    for start in range(
      0, (len(tokens) - 1) // self.chunk * self.chunk, self.chunk
    ):
      part = np.asarray(tokens[start : start + self.chunk], np.int32)
      key = hashlib.sha256(key + part.tobytes()).digest()
      keys.append(key)
    return keys

  def extend(self, table: PageTable, keys: Sequence[bytes]) -> int:
    """Gives an empty table the chunks that are here; returns their tokens."""
    hits = []
    for key in keys:
      if key not in self._chunks:
        break
      hits.append(key)
    for key in hits:
      chunk = self._chunks[key]
      table.adopt(chunk.pages, self.chunk, chunk.refined)
    # A chunk is of no use without those before it: they go last.
    for key in reversed(hits):
      self._chunks.move_to_end(key)
    return len(hits) * self.chunk

  def add(
    self,
    key: bytes,
    pages: Int[np.ndarray, "L C"],
    refined: Bool[np.ndarray, "L"],
  ) -> None:
    """Keeps a chunk, unless it is here."""
    if key in self._chunks:
      return
    self._pool.share(pages)
    self._pool.set_spare(pages, True)
    self._chunks[key] = _Chunk(pages=pages, refined=refined)

  def evict(self) -> bool:
    """Drops the chunk that was used longest ago; False where there is none."""
    if not self._chunks:
      return False
    _, chunk = self._chunks.popitem(last=False)
    self._pool.set_spare(chunk.pages, False)
    self._pool.release(chunk.pages)
    return True
