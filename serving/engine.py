"""The loop that owns the device: one thread, many sequences."""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from autoematic_jax.errors import PromptError
from autoematic_jax.kv_pages import REFINED_TOKENS
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.page_pool import PagePool
from autoematic_jax.precisions import Precision
from autoematic_jax.precisions import forced_levels
from autoematic_jax.serving import sampler
from autoematic_jax.serving.config import ServeConfig
from autoematic_jax.serving.detokenizer import Detokenizer
from autoematic_jax.serving.metrics import Metrics
from autoematic_jax.serving.runner import Runner
from autoematic_jax.serving.scheduler import Scheduler
from autoematic_jax.serving.scheduler import page_kinds
from autoematic_jax.serving.sequences import Output
from autoematic_jax.serving.sequences import SamplingParams
from autoematic_jax.serving.sequences import Sequence
from autoematic_jax.serving.sequences import TokenLogprobs


class Engine:
  """Takes sequences from any thread and runs them on its own.

  Attributes:
    model: What it serves.
    config: Its limits.
    metrics: What it did.
    failure: Why the thread died, or None.
    draining: Whether new work is to be refused.
  """

  def __init__(
    self,
    model: LanguageModel,
    config: ServeConfig,
    runner: Runner | None = None,
  ):
    self.model = model
    self.config = config
    self.metrics = Metrics()
    self.failure: BaseException | None = None
    self.draining = False
    self._runner = runner or Runner(model, config)
    self._scheduler = Scheduler(
      config,
      PagePool(model.config.num_layers, config.num_pages + 1),
      kinds=self._kinds,
      swap_out=self._swap_out,
      swap_in=self._swap_in,
    )
    self._inbox: queue.Queue[Sequence | None] = queue.Queue()
    self._live: set[Sequence] = set()
    self._lock = threading.Lock()
    self._thread = threading.Thread(
      target=self._loop, name="engine", daemon=True
    )

  def start(self) -> Iterator[tuple[int, int]]:
    """Compiles every program, yields the progress, and starts the thread."""
    yield from self._runner.compile_all()
    self.metrics.count_compilations()
    self._thread.start()

  def stop(self) -> None:
    """Ends what runs and then the thread."""
    self.draining = True
    self._inbox.put(None)
    self._thread.join()

  @property
  def live(self) -> int:
    """Sequences that have not ended."""
    return len(self._live)

  @property
  def queued(self) -> int:
    """Sequences that wait for a place."""
    return len(self._scheduler.waiting) + self._inbox.qsize()

  def precision(self, precision: Precision | None) -> np.ndarray:
    """Bits of each layer, `[L]`; see `forced_levels`."""
    return forced_levels(self.model, precision)

  def check(self, prompt: list[int], new_tokens: int) -> None:
    """Refuses a prompt that cannot be served, whatever else runs.

    Raises:
      PromptError: Empty, out of the vocabulary, or too long.
    """
    if not prompt:
      raise PromptError("the prompt is empty: it has no tokens")
    vocab = self.model.config.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab:
      raise PromptError(f"a token id is outside the vocabulary of {vocab}")
    limit = self.config.max_tokens
    if len(prompt) + min(new_tokens, 1) > limit:
      raise PromptError(
        f"the prompt has {len(prompt)} tokens; the context holds {limit},"
        " the answer included"
      )
    room = self.config.num_pages * REFINED_TOKENS
    if len(prompt) + 1 > room:
      raise PromptError(
        f"the prompt has {len(prompt)} tokens; the KV pages hold {room}"
      )

  def submit(
    self,
    prompt: list[int],
    params: SamplingParams,
    forced: np.ndarray,
    emit: Callable[[Output], None],
  ) -> Sequence:
    """Queues a checked prompt; `emit` takes its outputs on another thread."""
    decoder = self.model.tokenizer.stream_decoder()
    sequence = Sequence(
      prompt=prompt,
      params=params,
      forced=forced,
      emit=emit,
      detokenizer=Detokenizer(decoder, params.stop),
    )
    with self._lock:
      if self.failure is None:
        self._live.add(sequence)
        self._inbox.put(sequence)
        return sequence
    emit(Output(finish_reason="error"))
    return sequence

  def abort(self, sequence: Sequence) -> None:
    """Lets a sequence go; its pages are free within a step."""
    sequence.aborted = True

  def _loop(self):
    try:
      while self._receive():
        self._step()
      self._end_all("abort")
    except BaseException as error:  # Whatever it was, clients must hear.
      with self._lock:
        self.failure = error
      self._end_all("error")
      raise

  def _receive(self):
    """Takes what came; waits only where there is nothing to do."""
    scheduler = self._scheduler
    while True:
      idle = not (scheduler.running or scheduler.waiting)
      try:
        sequence = self._inbox.get(block=idle)
      except queue.Empty:
        return True
      if sequence is None:
        return False
      scheduler.add(sequence)

  def _end_all(self, reason):
    for sequence in self._snapshot():
      self._finish(sequence, reason)

  def _snapshot(self):
    """Those that have not ended; other threads add to them meanwhile."""
    with self._lock:
      return list(self._live)

  def _step(self):
    for sequence in [s for s in self._snapshot() if s.aborted]:
      self._finish(sequence, "abort")
    tick = self._scheduler.schedule()
    for sequence in tick.exhausted:
      self._finish(sequence, "length")
    if tick.decode:
      self._decode(tick.decode)
    for sequence, tokens in tick.prefill:
      self._prefill(sequence, tokens)
    self.metrics.observe_state(self._scheduler)

  def _decode(self, sequences):
    result = self._runner.decode(sequences)
    best, entropy, states, bits, refined = (
      np.asarray(part)
      for part in (
        result.best,
        result.entropy,
        result.policy,
        result.bits,
        result.refined,
      )
    )
    logits = None
    if any(s.params.needs_logits for s in sequences):
      logits = np.asarray(result.logits)
    for row, sequence in enumerate(sequences):
      sequence.table.commit(1, refined[:, row])
      sequence.policy = states[:, row]
      sequence.entropy = float(entropy[row])
      row_logits = logits[row] if logits is not None else None
      self.metrics.observe_layers("decode", bits[:, row])
      self._accept(sequence, int(best[row]), row_logits)

  def _prefill(self, sequence, tokens):
    result = self._runner.prefill(sequence, tokens)
    self._scheduler.finish_chunk(
      sequence, tokens, np.asarray(result.refined)[:, 0]
    )
    self.metrics.observe_layers("prefill", np.asarray(result.bits)[:, 0])
    if sequence.params.prompt_logprobs:
      self._add_prompt_logprobs(sequence, result, tokens)
    if not sequence.decoding:
      return
    if sequence.params.max_new_tokens == 0:
      self._finish(sequence, "length")
      return
    sequence.policy = self._runner.first_decode_state
    sequence.entropy = float(np.asarray(result.entropy)[0])
    logits = np.asarray(result.logits)[0]
    self._accept(sequence, int(np.asarray(result.best)[0]), logits)

  def _add_prompt_logprobs(self, sequence, result, tokens):
    """Those of the tokens behind each of this pass."""
    logits = self._runner.logits_of(np.asarray(result.hidden)[0, :tokens])
    found = sequence.prompt_logprobs
    if not found:
      found.append(TokenLogprobs(token=sequence.prompt[0], logprob=None))
    first = sequence.done - tokens + 1
    for row, token in zip(logits, sequence.prompt[first:], strict=False):
      found.append(sampler.logprobs(row, token, sequence.params.logprobs or 0))

  def _accept(self, sequence, best, logits):
    """Draws a token from a step's result and hands it on."""
    params = sequence.params
    token = best
    if params.temperature > 0 or params.adjusts:
      token = sampler.choose(logits, params, sequence.generated)
    logprobs = ()
    if params.logprobs is not None:
      logprobs = (sampler.logprobs(logits, token, params.logprobs),)
    sequence.generated.append(token)
    ended = not params.ignore_eos and token in self.model.eos_ids
    text = "" if ended else sequence.detokenizer.push(token)
    reason = None
    if ended or sequence.detokenizer.stopped:
      reason = "stop"
    elif self._full(sequence):
      reason = "length"
    self.metrics.observe_token(sequence, time.perf_counter())
    if reason is not None:
      self._finish(sequence, reason, text, (token,), logprobs)
      return
    prompt, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    sequence.emit(
      Output(text=text, tokens=(token,), logprobs=(*prompt, *logprobs))
    )

  def _full(self, sequence):
    made = len(sequence.generated)
    total = len(sequence.prompt) + made
    return (
      made >= sequence.params.max_new_tokens or total >= self.config.max_tokens
    )

  def _finish(self, sequence, reason, text="", tokens=(), logprobs=()):
    """Frees what a sequence has and says how it ended."""
    self._live.discard(sequence)
    self._scheduler.remove(sequence)
    rest = sequence.detokenizer.flush()
    if reason == "length" and sequence.detokenizer.stopped:
      reason = "stop"
    self.metrics.observe_end(sequence, reason)
    sequence.emit(
      Output(
        text=text + rest,
        tokens=tokens,
        logprobs=(*sequence.prompt_logprobs, *logprobs),
        finish_reason=reason,
        cached_tokens=sequence.cached,
      )
    )

  def _kinds(self, sequence):
    policy = self.model.policy
    return page_kinds(
      has_base=self._runner.has_base_pages,
      forced=sequence.forced,
      levels=policy.levels,
      kv_floor=policy.kv_min_level,
    )

  def _swap_out(self, sequence):
    contents = self._runner.copy_out(sequence.table)
    sequence.swapped = (sequence.table.stored.copy(), contents)

  def _swap_in(self, sequence):
    self._runner.copy_in(sequence.table, sequence.swapped[1])


def random_seed() -> int:
  """A seed for who gave none."""
  return secrets.randbits(62)
