"""The compiled passes over batches of sequences."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from autoematic_jax import kv_pages
from autoematic_jax import policy as policy_lib
from autoematic_jax import signals
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.page_pool import PageTable
from autoematic_jax.serving.config import ServeConfig

HEAD_ROWS = 32
"""Rows of the program that gives logits of prompts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """What a pass takes besides weights and pages.

  Attributes:
    tokens: `[B, T]` new tokens, padded at the end.
    start: `[B]` position of the first.
    forced: `[L, B]` bits, or -1 where the policy decides.
    policy: `[S, B]` packed policy states.
    entropy: `[B]` of the logits before.
    tables: The requests' pages.
  """

  tokens: Int[Array | np.ndarray, "B T"]
  start: Int[Array | np.ndarray, "B"]
  forced: Int[Array | np.ndarray, "L B"]
  policy: Float[Array | np.ndarray, "S B"]
  entropy: Float[Array | np.ndarray, "B"]
  tables: kv_pages.BlockTables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassResult:
  """What came out, for each request.

  Attributes:
    logits: `[B, V]` behind the last token.
    best: `[B]` most likely token.
    entropy: `[B]` of the logits.
    policy: `[S, B]` packed policy states.
    bits: `[L, B]` at which each layer ran.
    refined: `[L, B]` whether the new tokens went to refined pages.
    hidden: `[B, T, D]` last hidden states.
  """

  logits: Float[Array, "B V"]
  best: Int[Array, "B"]
  entropy: Float[Array, "B"]
  policy: Float[Array, "S B"]
  bits: Int[Array, "L B"]
  refined: Array
  hidden: Float[Array, "B T D"]


def _run(decoder, planes, positions, batch, *, phase, config, codec, head_dim):
  tables = batch.tables
  cache = kv_pages.PagedCache(
    planes=planes,
    positions=positions,
    tables=tables,
    codec=codec,
    head_dim=head_dim,
  )
  state = policy_lib.unpack(batch.policy)
  if phase == "decode":
    state = policy_lib.start_step(config, state, batch.entropy)
  hidden, cache, state, trace = decoder.run_layers(
    batch.tokens,
    start=batch.start,
    lengths=tables.new,
    cache=cache,
    policy=state,
    forced=batch.forced,
    policy_config=config,
    phase=phase,
  )
  at = (tables.new - 1)[:, None, None]
  logits = decoder.logits(jnp.take_along_axis(hidden, at, axis=1)[:, 0])
  return (
    cache.planes,
    cache.positions,
    PassResult(
      logits=logits,
      best=jnp.argmax(logits, axis=-1).astype(jnp.int32),
      entropy=signals.topk_entropy(logits, config.entropy_top_k),
      policy=policy_lib.pack(state),
      bits=trace.bits,
      refined=cache.tables.stored[..., 1] > tables.stored[..., 1],
      hidden=hidden,
    ),
  )


def _take(planes, positions, pages):
  layers = jnp.arange(pages.shape[0])
  return {n: p[layers, pages] for n, p in planes.items()}, positions[
    layers, pages
  ]


def _put(planes, positions, pages, content):
  layers = jnp.arange(pages.shape[0])
  planes = {
    name: plane.at[layers, pages].set(content[0][name])
    for name, plane in planes.items()
  }
  return planes, positions.at[layers, pages].set(content[1])


class Runner:
  """Owns the pages on the device and every program that touches them.

  Programs are compiled for a few shapes before the first request; inputs are
  padded to the next of them, which changes no result.
  """

  def __init__(self, model: LanguageModel, config: ServeConfig):
    self.model = model
    self.config = config
    cache = model.init_cache(1, 1)
    self._static = {
      "config": model.policy,
      "codec": cache.codec,
      "head_dim": cache.head_dim,
    }
    self._planes, self._positions = kv_pages.init_pages(
      num_layers=model.config.num_layers,
      num_pages=config.num_pages + 1,
      num_kv_heads=model.config.num_kv_heads,
      head_dim=model.config.head_dim,
      codec=cache.codec,
    )
    self._prefill_state = _column(policy_lib.start_prefill(model.policy, 1))
    self._decode_state = _column(policy_lib.start_decode(model.policy, 1))
    self._chunks = (kv_pages.REFINED_TOKENS, config.chunk)
    self._programs: dict[Any, Callable] = {}
    jitted = jax.jit(
      _run,
      static_argnames=("phase", "config", "codec", "head_dim"),
      donate_argnames=("planes", "positions"),
    )
    self._jitted = jitted

  @property
  def has_base_pages(self) -> bool:
    """Whether 4-bit tokens have pages of their own."""
    return kv_pages.has_base_pages(self._static["codec"])

  @property
  def first_decode_state(self) -> Float[np.ndarray, "S"]:
    """Packed policy state of a sequence whose prompt is through."""
    return self._decode_state

  def compile_all(self) -> Iterator[tuple[int, int]]:
    """Compiles every program; yields how many are done, of how many."""
    shapes = [
      ("decode", rows, 1, length)
      for rows in self.config.batches
      for length in self.config.lengths
    ] + [
      ("prefill", 1, tokens, length)
      for tokens in self._chunks
      for length in self.config.lengths
    ]
    for done, shape in enumerate(shapes):
      yield done, len(shapes) + 1
      self._compile(*shape)
    self._compile_small()
    yield len(shapes) + 1, len(shapes) + 1

  def _compile(self, phase, rows, tokens, length):
    batch = self._batch(phase, [], rows, tokens, length)
    self._programs[phase, rows, tokens, length] = self._jitted.lower(
      self.model.decoder,
      self._planes,
      self._positions,
      batch,
      phase=phase,
      **self._static,
    ).compile()

  def _compile_small(self):
    pages = np.zeros((self.model.config.num_layers,), np.int32)
    take = jax.jit(_take).lower(self._planes, self._positions, pages).compile()
    content = jax.tree.map(
      np.asarray, take(self._planes, self._positions, pages)
    )
    put = jax.jit(_put, donate_argnums=(0, 1))
    self._programs["take"] = take
    self._programs["put"] = put.lower(
      self._planes, self._positions, pages, content
    ).compile()
    rows = np.zeros((HEAD_ROWS, self.model.config.hidden_size), np.float32)
    head = jax.jit(lambda decoder, hidden: decoder.logits(hidden))
    self._programs["head"] = head.lower(self.model.decoder, rows).compile()

  def prefill(self, sequence, tokens: int) -> PassResult:
    """Runs the next `tokens` of a sequence's prompt; pages are reserved."""
    size = next(size for size in self._chunks if size >= tokens)
    return self._execute("prefill", [sequence], 1, size, tokens)

  def decode(self, sequences) -> PassResult:
    """Runs the last token of each sequence; pages are reserved."""
    rows = next(b for b in self.config.batches if b >= len(sequences))
    return self._execute("decode", sequences, rows, 1, 1)

  def _execute(self, phase, sequences, rows, size, tokens):
    need = max(s.table.tokens for s in sequences) + size
    length = next(n for n in self.config.lengths if n >= need)
    batch = self._batch(phase, sequences, rows, size, length, tokens)
    self._planes, self._positions, result = self._programs[
      phase, rows, size, length
    ](self.model.decoder, self._planes, self._positions, batch)
    return result

  def _batch(self, phase, sequences, rows, size, length, tokens=1):
    """Inputs of a pass; what fills a batch repeats its first sequence.

    So it runs at the same levels, which are faster where they agree, and
    writes the same bytes to the same pages.
    """
    layers = self.model.config.num_layers
    base = np.zeros((layers, rows, length // kv_pages.BASE_TOKENS), np.int32)
    refined = np.zeros(
      (layers, rows, length // kv_pages.REFINED_TOKENS), np.int32
    )
    stored = np.zeros((layers, rows, 2), np.int32)
    new_tokens = np.zeros((rows, size), np.int32)
    start = np.zeros((rows,), np.int32)
    forced = np.full((layers, rows), -1, np.int32)
    states = np.zeros((len(self._decode_state), rows), np.float32)
    entropy = np.zeros((rows,), np.float32)
    for row in range(rows if sequences else 0):
      sequence = sequences[row if row < len(sequences) else 0]
      forced[:, row] = sequence.forced
      entropy[row] = sequence.entropy
      if phase == "decode":
        new_tokens[row, 0] = sequence.generated[-1]
        states[:, row] = sequence.policy
      else:
        states[:, row] = self._prefill_state
        part = sequence.prompt[sequence.done : sequence.done + tokens]
        new_tokens[row, :tokens] = part
      table = sequence.table
      start[row] = table.tokens
      stored[:, row] = table.stored
      for wide, narrow in ((base, table.base), (refined, table.refined)):
        width = min(wide.shape[2], narrow.shape[1])
        wide[:, row, :width] = narrow[:, :width]
    return Batch(
      tokens=new_tokens,
      start=start,
      forced=forced,
      policy=states,
      entropy=entropy,
      tables=kv_pages.BlockTables(
        base=base,
        refined=refined,
        stored=stored,
        new=np.full((rows,), tokens, np.int32),
      ),
    )

  def logits_of(self, hidden: Float[np.ndarray, "T D"]) -> np.ndarray:
    """`[T, V]` logits behind every token of a prefill pass."""
    parts = []
    for first in range(0, len(hidden), HEAD_ROWS):
      rows = hidden[first : first + HEAD_ROWS]
      padded = np.zeros((HEAD_ROWS, hidden.shape[1]), np.float32)
      padded[: len(rows)] = rows
      logits = self._programs["head"](self.model.decoder, padded)
      parts.append(np.asarray(logits)[: len(rows)])
    return np.concatenate(parts)

  def copy_out(self, table: PageTable) -> list:
    """What a sequence's pages hold, on the host."""
    return [
      jax.tree.map(
        lambda x: np.array(x),
        self._programs["take"](self._planes, self._positions, pages),
      )
      for pages in _columns(table)
    ]

  def copy_in(self, table: PageTable, contents: list) -> None:
    """Brings them back to the pages that the sequence has now."""
    for pages, content in zip(_columns(table), contents, strict=True):
      self._planes, self._positions = self._programs["put"](
        self._planes, self._positions, pages, content
      )


def _columns(table):
  """`[L]` page ids, as often as the longest row of the tables is long."""
  for pages in (table.base, table.refined):
    for column in pages.T:
      if column.any():
        yield np.ascontiguousarray(column)


def _column(state):
  return np.asarray(policy_lib.pack(state))[:, 0]
