"""Which sequences run in the next tick, and who gets the pages for it."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from autoematic_jax.page_pool import BASE
from autoematic_jax.page_pool import REFINED
from autoematic_jax.page_pool import PagePool
from autoematic_jax.page_pool import PageTable
from autoematic_jax.serving.config import ServeConfig
from autoematic_jax.serving.prefix_cache import PrefixCache
from autoematic_jax.serving.sequences import Sequence


@dataclasses.dataclass(kw_only=True)
class Tick:
  """What to run; pages are reserved for all of it.

  Attributes:
    decode: Sequences that take one step together.
    prefill: Sequences and how many tokens of their prompts come next.
    exhausted: Sequences that need more than all pages.
  """

  decode: list[Sequence] = dataclasses.field(default_factory=list)
  prefill: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)
  exhausted: list[Sequence] = dataclasses.field(default_factory=list)


class Scheduler:
  """First come, first served; decode steps before prompts.

  Every tick runs all sequences that decode, then chunks of prompts up to the
  token budget. Who came last gives its pages up where they run out: its
  contents go to the host and come back, so that it goes on where it was.

  Attributes:
    waiting: Sequences that have no pages.
    running: Sequences that have.
    preemptions: How often pages ran out.
    queries: Prompt tokens looked up in the prefix cache.
    hits: Those found.
  """

  def __init__(
    self,
    config: ServeConfig,
    pool: PagePool,
    *,
    kinds: Callable[[Sequence], tuple[int, ...]],
    swap_out: Callable[[Sequence], None],
    swap_in: Callable[[Sequence], None],
  ):
    self._config = config
    self._kinds = kinds
    self._swap_out = swap_out
    self._swap_in = swap_in
    self.pool = pool
    self.prefixes = PrefixCache(pool, config.chunk)
    self.waiting: deque[Sequence] = deque()
    self.running: list[Sequence] = []
    self.preemptions = self.queries = self.hits = 0

  def add(self, sequence: Sequence) -> None:
    """Queues a sequence."""
    self.waiting.append(sequence)

  def remove(self, sequence: Sequence) -> None:
    """Forgets a sequence and frees its pages."""
    if sequence in self.running:
      self.running.remove(sequence)
    elif sequence in self.waiting:
      self.waiting.remove(sequence)
    if sequence.table is not None:
      sequence.table.release()
      sequence.table = None
    sequence.swapped = None

  def schedule(self) -> Tick:
    """Reserves pages for the next tick and says what it runs."""
    tick = Tick()
    for sequence in [s for s in self.running if s.decoding]:
      if sequence in self.running:
        self._add_decode(tick, sequence)
    admitted = self._admit()
    budget = self._config.token_budget - len(tick.decode)
    for sequence in [s for s in self.running if not s.decoding]:
      tokens = self._next_chunk(sequence)
      fits = tokens <= budget or not tick.prefill
      if not fits or not self._reserve(sequence, tokens):
        break
      tick.prefill.append((sequence, tokens))
      budget -= tokens
    if not (tick.decode or tick.prefill or tick.exhausted or admitted):
      self._free_some(tick)
    return tick

  def _next_chunk(self, sequence):
    return min(self._config.chunk, len(sequence.prompt) - sequence.done)

  def _add_decode(self, tick, sequence):
    while not self._reserve(sequence, 1):
      last = self.running[-1]
      if last is sequence and len(self.running) == 1:
        tick.exhausted.append(sequence)
        return
      self._preempt(last)
      if last is sequence:
        return
    tick.decode.append(sequence)

  def _free_some(self, tick):
    """Prompts that wait for each other's pages: who came last starts anew."""
    if len(self.running) > 1:
      self._preempt(self.running[-1])
    elif self.running:
      tick.exhausted.append(self.running[0])

  def _reserve(self, sequence, tokens):
    kinds = self._kinds(sequence)
    while not sequence.table.reserve(tokens, kinds):
      if not self.prefixes.evict():
        return False
    return True

  def _preempt(self, sequence):
    self.preemptions += 1
    self._swap_out(sequence)
    sequence.table.release()
    sequence.table = None
    self.running.remove(sequence)
    self.waiting.appendleft(sequence)

  def _admit(self):
    """Gives those that wait a place and pages; returns how many."""
    count = 0
    while self.waiting and len(self.running) < self._config.max_running:
      sequence = self.waiting[0]
      sequence.table = PageTable(self.pool, self._config.max_tokens)
      if sequence.swapped is not None:
        admitted = self._restore(sequence)
      else:
        self._extend(sequence)
        admitted = self._has_room(sequence)
      if not admitted:
        sequence.table.release()
        sequence.table, sequence.done = None, self._done_before(sequence)
        break
      self.waiting.popleft()
      self.running.append(sequence)
      sequence.scheduled = sequence.scheduled or time.perf_counter()
      count += 1
    return count

  def _done_before(self, sequence):
    return sequence.done if sequence.swapped is not None else 0

  def _restore(self, sequence):
    stored = sequence.swapped[0]
    while not sequence.table.restore(stored):
      if not self.prefixes.evict():
        return False
    self._swap_in(sequence)
    sequence.swapped = None
    return True

  def _extend(self, sequence):
    if not self._config.prefix_cache or sequence.params.prompt_logprobs:
      return
    if not sequence.keys:
      sequence.keys = self.prefixes.keys(
        sequence.prompt, sequence.forced.tobytes()
      )
    sequence.done = self.prefixes.extend(sequence.table, sequence.keys)

  def _has_room(self, sequence):
    """Whether the next chunk fits, once older chunks are forgotten."""
    tokens = self._next_chunk(sequence)
    needed = sequence.table.missing(tokens, self._kinds(sequence))
    while np.any(needed > self.pool.free):
      if not self.prefixes.evict():
        return False
    if self._config.prefix_cache and not sequence.params.prompt_logprobs:
      self.queries += len(sequence.prompt)
      self.hits += sequence.done
      sequence.cached = sequence.done
    return True

  def finish_chunk(self, sequence: Sequence, tokens: int, refined) -> None:
    """Takes note of a prefill pass and keeps whole chunks for others.

    Args:
      sequence: Whose prompt it was.
      tokens: Of the pass.
      refined: `[L]` whether they went to refined pages.
    """
    table = sequence.table
    assert table is not None, "a pass without pages"
    table.commit(tokens, refined)
    index = sequence.done // self._config.chunk
    sequence.done += tokens
    whole = tokens == self._config.chunk and index < len(sequence.keys)
    if whole:
      pages = table.last_pages(tokens, refined)
      self.prefixes.add(sequence.keys[index], pages, refined)


def page_kinds(
  *, has_base: bool, forced: np.ndarray, levels: tuple[int, ...], kv_floor: int
) -> tuple[int, ...]:
  """Kinds of pages that a sequence's layers may ask for.

  Args:
    has_base: Whether 4-bit tokens have pages of their own.
    forced: `[L]` bits of each layer, or -1 where the policy decides.
    levels: Of the policy.
    kv_floor: Bits that the policy keeps keys and values at, at least.
  """
  if not has_base:
    return (REFINED,)
  bits = {int(b) for b in forced if b >= 0}
  if np.any(forced < 0):
    bits |= {max(level, kv_floor) for level in levels}
  kinds = []
  if min(bits) < 6:
    kinds.append(BASE)
  if max(bits) >= 6:
    kinds.append(REFINED)
  return tuple(kinds)
