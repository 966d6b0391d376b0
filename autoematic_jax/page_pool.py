"""Who owns which page, on the host: allocation, sharing and giving back."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from autoematic_jax.kv_pages import BASE_TOKENS
from autoematic_jax.kv_pages import NO_PAGE
from autoematic_jax.kv_pages import REFINED_TOKENS

BASE, REFINED = 0, 1
"""The kinds of pages, as indices."""

PAGE_TOKENS = (BASE_TOKENS, REFINED_TOKENS)


class PagePool:
  """The free pages of every layer, and how many owners the others have.

  Attributes:
    references: `[L, N]` owners of each page; NO_PAGE always has one.
    spare: `[L, N]` pages of which one owner would give them up at any time.
  """

  def __init__(self, num_layers: int, num_pages: int):
    self.references = np.zeros((num_layers, num_pages), np.int32)
    self.references[:, NO_PAGE] = 1
    self.spare = np.zeros((num_layers, num_pages), bool)
    # A stack for each layer; the lowest page is on top.
    order = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
    self._free = np.tile(order, (num_layers, 1))
    self._count = np.full((num_layers,), num_pages - 1)

  @property
  def capacity(self) -> int:
    """Pages of a layer that can be owned."""
    return self.references.shape[1] - 1

  @property
  def free(self) -> Int[np.ndarray, "L"]:
    """Free pages of each layer."""
    return self._count.copy()

  @property
  def usage(self) -> float:
    """Share of all pages that an owner needs."""
    return float(np.mean(self.references[:, 1:] > self.spare[:, 1:]))

  def set_spare(self, pages: Int[np.ndarray, "L C"], spare: bool) -> None:
    """Says whether one owner of these pages would give them up."""
    layers, columns = np.nonzero(pages != NO_PAGE)
    self.spare[layers, pages[layers, columns]] = spare

  def allocate(
    self, counts: Int[np.ndarray, "L"]
  ) -> Int[np.ndarray, "L C"] | None:
    """Takes pages, `counts` of each layer.

    Returns:
      The pages, the rest of each row NO_PAGE; None where some layer has too
      few, and then nothing is taken.
    """
    if np.any(counts > self._count):
      return None
    width = int(counts.max(initial=0))
    pages = np.full((len(counts), width), NO_PAGE, np.int32)
    for column in range(width):
      layers = np.flatnonzero(counts > column)
      self._count[layers] -= 1
      taken = self._free[layers, self._count[layers]]
      self.references[layers, taken] = 1
      pages[layers, column] = taken
    return pages

  def share(self, pages: Int[np.ndarray, "L C"]) -> None:
    """Adds an owner to pages of each layer; NO_PAGE is left out."""
    layers, columns = np.nonzero(pages != NO_PAGE)
    np.add.at(self.references, (layers, pages[layers, columns]), 1)

  def release(self, pages: Int[np.ndarray, "L C"]) -> None:
    """Takes an owner from pages of each layer; the last one frees a page."""
    for column in pages.T:
      layers = np.flatnonzero(column != NO_PAGE)
      ids = column[layers]
      self.references[layers, ids] -= 1
      gone = self.references[layers, ids] == 0
      layers, ids = layers[gone], ids[gone]
      self._free[layers, self._count[layers]] = ids
      self._count[layers] += 1


class PageTable:
  """The pages of one request.

  A pass over new tokens is reserved, run and committed: only the run says
  which kind of page a layer's tokens went to.

  Attributes:
    base: `[L, P]` its base pages in order, then NO_PAGE.
    refined: `[L, R]` its refined pages in order, then NO_PAGE.
    stored: `[L, 2]` tokens in each kind.
  """

  def __init__(self, pool: PagePool, max_tokens: int):
    layers = len(pool.references)
    self._pool = pool
    self.base = np.full(
      (layers, -(-max_tokens // BASE_TOKENS)), NO_PAGE, np.int32
    )
    self.refined = np.full(
      (layers, -(-max_tokens // REFINED_TOKENS)), NO_PAGE, np.int32
    )
    self.stored = np.zeros((layers, 2), np.int32)
    self._fresh = np.zeros((layers, 0), np.int32)

  @property
  def tokens(self) -> int:
    """Tokens that it holds."""
    return int(self.stored[0].sum())

  def owned(self) -> list[Int[np.ndarray, "L C"]]:
    """Its pages, base and refined, once each."""
    held = self._held()
    return [
      np.where(np.arange(table.shape[1]) < held[:, [kind]], table, NO_PAGE)
      for kind, table in enumerate((self.base, self.refined))
    ] + [self._fresh]

  def _held(self):
    return -(-self.stored // np.asarray(PAGE_TOKENS))

  def missing(self, tokens: int, kinds: Sequence[int]) -> Int[np.ndarray, "L"]:
    """Pages of each layer that `tokens` more could need, whatever the kind."""
    wanted = -(-(self.stored + tokens) // np.asarray(PAGE_TOKENS))
    return (wanted - self._held())[:, list(kinds)].max(axis=1)

  def reserve(self, tokens: int, kinds: Sequence[int]) -> bool:
    """Takes the pages that the next `tokens` may go to.

    Args:
      tokens: New tokens of the pass.
      kinds: Kinds that its levels may ask for.

    Returns:
      Whether the pool had them; if not, nothing changed.
    """
    fresh = self._pool.allocate(self.missing(tokens, kinds))
    if fresh is None:
      return False
    self._fresh = fresh
    self._put(fresh, kinds)
    return True

  def _put(self, pages, kinds):
    """Writes fresh pages behind those held, in each kind's table."""
    width = pages.shape[1]
    held = self._held()
    for kind in kinds:
      table = (self.base, self.refined)[kind]
      for column in range(width):
        at = held[:, kind] + column
        fits = np.flatnonzero(at < table.shape[1])
        table[fits, at[fits]] = pages[fits, column]

  def commit(self, tokens: int, refined: Bool[np.ndarray, "L"]) -> None:
    """Keeps the pages that the pass filled and gives the others back.

    Args:
      tokens: Tokens that the pass stored.
      refined: Of each layer, whether they went to refined pages.
    """
    fresh, self._fresh = self._fresh, self._fresh[:, :0]
    self._put(np.full_like(fresh, NO_PAGE), (BASE, REFINED))
    layers = np.arange(len(refined))
    before = self._held()
    self.stored[layers, refined.astype(np.int32)] += tokens
    used = (self._held() - before).max(axis=1)
    columns = np.arange(fresh.shape[1])
    kept = columns < used[:, None]
    for kind, table in enumerate((self.base, self.refined)):
      chosen = kept & (refined == kind)[:, None]
      rows, columns_kept = np.nonzero(chosen)
      table[rows, before[rows, kind] + columns_kept] = fresh[rows, columns_kept]
    self._pool.release(np.where(kept, NO_PAGE, fresh))

  def adopt(self, pages: Int[np.ndarray, "L C"], stored, refined) -> None:
    """Appends full pages that others own as well, and shares them.

    Args:
      pages: Of each layer, then NO_PAGE.
      stored: Tokens in them.
      refined: `[L]` whether they are refined pages.
    """
    self._pool.share(pages)
    self._fresh = pages
    self.commit(stored, refined)

  def restore(self, stored: Int[np.ndarray, "L 2"]) -> bool:
    """Takes pages for as many tokens as an empty table held before.

    Returns:
      Whether the pool had them; their contents are the caller's to bring back.
    """
    held = -(-stored // np.asarray(PAGE_TOKENS))
    pages = self._pool.allocate(held.sum(axis=1))
    if pages is None:
      return False
    for layer, (base, refined) in enumerate(held):
      self.base[layer, :base] = pages[layer, :base]
      self.refined[layer, :refined] = pages[layer, base : base + refined]
    self.stored[:] = stored
    return True

  def last_pages(
    self, tokens: int, refined: Bool[np.ndarray, "L"]
  ) -> Int[np.ndarray, "L C"]:
    """Pages that hold the last `tokens`, which fill them."""
    held = self._held()
    layers = np.arange(len(refined))
    pages = np.full((len(refined), tokens // REFINED_TOKENS), NO_PAGE, np.int32)
    for kind, table in enumerate((self.base, self.refined)):
      count = tokens // PAGE_TOKENS[kind]
      chosen = layers[refined == kind]
      for column in range(count):
        at = held[chosen, kind] - count + column
        pages[chosen, column] = table[chosen, at]
    return pages

  def release(self) -> None:
    """Gives all pages back; the table is empty after it."""
    for pages in self.owned():
      self._pool.release(pages)
    self._fresh = self._fresh[:, :0]
    self.base[:] = self.refined[:] = NO_PAGE
    self.stored[:] = 0
