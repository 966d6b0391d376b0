"""No page is lost or owned twice, whatever requests do."""

from collections import Counter

import hypothesis
import numpy as np
from hypothesis import stateful
from hypothesis import strategies as st

from autoematic_jax.page_pool import PAGE_TOKENS
from autoematic_jax.page_pool import PagePool
from autoematic_jax.page_pool import PageTable
from autoematic_jax.serving.prefix_cache import PrefixCache

LAYERS, PAGES, MAX_TOKENS, CHUNK = 3, 24, 256, 64


class Requests(stateful.RuleBasedStateMachine):
  """Prefills in chunks, then tokens one by one, at levels that come as may."""

  def __init__(self):
    super().__init__()
    self.pool = PagePool(LAYERS, PAGES)
    self.prefixes = PrefixCache(self.pool, CHUNK)
    self.tables = {}
    self.lengths = {}
    self.made = 0

  kinds = st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS)
  pick = st.integers(0, 100)

  @stateful.rule(prompt=st.integers(0, 2), chunks=st.integers(0, 3))
  def begin(self, prompt, chunks):
    """Prompts of the same number begin alike."""
    table = PageTable(self.pool, MAX_TOKENS)
    tokens = [prompt] * (chunks * CHUNK + 1)
    keys = self.prefixes.keys(tokens, b"")
    assert len(keys) == chunks
    hit = self.prefixes.extend(table, keys)
    assert table.tokens == hit
    self.tables[self.made], self.lengths[self.made] = table, hit
    self.made += 1

  @stateful.precondition(lambda self: self.tables)
  @stateful.rule(
    pick=pick, tokens=st.sampled_from([1, 5, 33, CHUNK, CHUNK]), refined=kinds
  )
  def append(self, pick, tokens, refined):
    name = sorted(self.tables)[pick % len(self.tables)]
    table = self.tables[name]
    if table.tokens + tokens > MAX_TOKENS:
      return
    free = self.pool.free
    if not table.reserve(tokens, (0, 1)):
      assert np.array_equal(free, self.pool.free)
      assert np.any(table.missing(tokens, (0, 1)) > free)
      return
    table.commit(tokens, np.asarray(refined))
    self.lengths[name] += tokens
    if tokens == CHUNK and not np.any(table.stored % CHUNK):
      key = self.prefixes.keys([pick % 3] * (table.tokens + 1), b"")[-1]
      pages = table.last_pages(CHUNK, np.asarray(refined))
      self.prefixes.add(key, pages, np.asarray(refined))

  @stateful.precondition(lambda self: self.tables)
  @stateful.rule(pick=pick)
  def abandon_a_reserved_pass(self, pick):
    name = sorted(self.tables)[pick % len(self.tables)]
    if self.tables[name].tokens < MAX_TOKENS:
      self.tables[name].reserve(1, (0, 1))
    self.tables.pop(name).release()

  @stateful.precondition(lambda self: self.tables)
  @stateful.rule(pick=pick)
  def end(self, pick):
    name = sorted(self.tables)[pick % len(self.tables)]
    table = self.tables.pop(name)
    table.release()
    assert table.tokens == 0

  @stateful.precondition(lambda self: self.tables)
  @stateful.rule(pick=pick)
  def preempt_and_resume(self, pick):
    name = sorted(self.tables)[pick % len(self.tables)]
    table = self.tables[name]
    stored = table.stored.copy()
    table.release()
    if not table.restore(stored):
      assert table.tokens == 0
      del self.tables[name]

  @stateful.rule()
  def evict(self):
    self.prefixes.evict()

  @stateful.invariant()
  def every_page_is_free_or_owned_as_often_as_counted(self):
    owners = [Counter() for _ in range(LAYERS)]
    held = [p for t in self.tables.values() for p in t.owned()]
    held += [chunk.pages for chunk in self.prefixes._chunks.values()]
    for pages in held:
      for layer, row in enumerate(pages):
        owners[layer].update(row[row != 0].tolist())
    for layer in range(LAYERS):
      counted = {
        page: int(count)
        for page, count in enumerate(self.pool.references[layer])
        if page and count
      }
      assert counted == owners[layer]
      assert self.pool.free[layer] == PAGES - 1 - len(counted)

  @stateful.invariant()
  def tables_hold_their_tokens_and_no_page_twice(self):
    for name, table in self.tables.items():
      assert (table.stored.sum(axis=1) == self.lengths[name]).all()
      for kind, pages in enumerate((table.base, table.refined)):
        held = -(-table.stored[:, kind] // PAGE_TOKENS[kind])
        assert ((pages != 0).sum(axis=1) == held).all()
      for layer in range(LAYERS):
        row = np.concatenate([p[layer] for p in table.owned()])
        row = row[row != 0]
        assert len(set(row.tolist())) == len(row)

  def teardown(self):
    for table in self.tables.values():
      table.release()
    while self.prefixes.evict():
      pass
    assert (self.pool.free == PAGES - 1).all()
    assert (self.pool.references[:, 1:] == 0).all()
    assert self.pool.usage == 0


TestRequests = Requests.TestCase
TestRequests.settings = hypothesis.settings(
  max_examples=40, stateful_step_count=30, deadline=None
)
