"""One call of generation: the loop on the host around the programs."""

import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from autoematic_jax import programs
from autoematic_jax.results import GenerationResult
from autoematic_jax.results import TextChunk
from autoematic_jax.sampling import SamplingArrays

STEPS_PER_CALL = 8
"""Decode steps between two looks at the result by the host."""


def bucket(count: int, smallest: int = 32) -> int:
  """The next of 32, 48, 64, 96, 128, 192, ... so that few shapes compile."""
  size = smallest
  while size < count:
    if size * 3 // 2 >= count:
      return size * 3 // 2
    size *= 2
  return size


class Run:
  """One call of `stream`: the batch, its state and what came out so far."""

  def __init__(
    self, model, encoded, *, max_new_tokens, forced, sampling, stop_tokens
  ):
    self.model = model
    self.encoded = encoded
    self.stop_tokens = set(stop_tokens)
    room = [model.config.max_positions - len(ids) for ids in encoded]
    self.limits: list[int] = [min(max_new_tokens, left) for left in room]
    self.request = programs.Request(
      forced=jnp.asarray(forced),
      stop_tokens=jnp.asarray(stop_tokens or [-1], jnp.int32),
      sampling=SamplingArrays.of(sampling),
    )
    self.settings = programs.Settings(
      policy=model.policy,
      greedy=all(s.temperature == 0 for s in sampling),
      steps=STEPS_PER_CALL,
    )
    self.token_ids: list[list[int]] = [[] for _ in encoded]
    self.decoders = [model.tokenizer.stream_decoder() for _ in encoded]
    self.texts = ["" for _ in encoded]
    self.bits = []
    self.decode_seconds = 0.0
    self.decode_steps = 0
    self.compiled_before = model.programs.compile_seconds

  @property
  def finished(self) -> bool:
    return all(map(self._done, range(len(self.encoded))))

  def _done(self, request) -> bool:
    tokens = self.token_ids[request]
    stopped = bool(tokens) and tokens[-1] in self.stop_tokens
    return stopped or len(tokens) >= self.limits[request]

  def prefill(self) -> Iterator[TextChunk]:
    """Runs the prompts; yields the text of the first tokens."""
    lengths = [len(ids) for ids in self.encoded]
    padded = bucket(max(lengths))
    tokens = np.zeros((len(lengths), padded), np.int32)
    for row, ids in zip(tokens, self.encoded, strict=True):
      row[: len(ids)] = ids
    capacity = max(
      length + limit for length, limit in zip(lengths, self.limits, strict=True)
    )
    cache = self.model.init_cache(
      len(lengths), max(capacity + STEPS_PER_CALL, padded)
    )
    arguments = (
      self.model.decoder,
      jnp.asarray(tokens),
      jnp.asarray(lengths, jnp.int32),
      cache,
      self.request,
      self.settings,
    )
    (self.state, bits), self.prefill_seconds = self._timed(
      self.model.programs.prefill, arguments
    )
    self.prefill_levels = np.asarray(bits)
    yield from self._accept(np.asarray(self.state.token)[None])

  def decode(self) -> Iterator[TextChunk]:
    """Runs a few decode steps; yields their text."""
    (self.state, (tokens, bits)), seconds = self._timed(
      self.model.programs.decode,
      (self.model.decoder, self.state, self.request, self.settings),
    )
    self.decode_seconds += seconds
    self.decode_steps += STEPS_PER_CALL
    self.bits.append(np.asarray(bits))
    yield from self._accept(np.asarray(tokens))

  def _timed(self, program, arguments):
    """Result and seconds of a program, compilation left out."""
    compiled = self.model.programs.compile_seconds
    start = time.perf_counter()
    result = jax.block_until_ready(program(*arguments))
    seconds = time.perf_counter() - start
    return result, seconds - (self.model.programs.compile_seconds - compiled)

  def _accept(self, tokens) -> Iterator[TextChunk]:
    """Takes `[steps, R]` tokens up to each request's end."""
    for request in range(len(self.encoded)):
      new = []
      for token in tokens[:, request].tolist():
        if self._done(request):
          break
        self.token_ids[request].append(token)
        new.append(token)
      visible = [token for token in new if token not in self.stop_tokens]
      text = "".join(map(self.decoders[request].push, visible))
      self.texts[request] += text
      if new:
        yield TextChunk(request=request, text=text, token_ids=tuple(new))

  def flush(self) -> Iterator[TextChunk]:
    """Text that waited for more bytes of a character."""
    for request, decoder in enumerate(self.decoders):
      text = decoder.flush()
      self.texts[request] += text
      if text:
        yield TextChunk(request=request, text=text, token_ids=())

  def result(self) -> GenerationResult:
    """Everything that came out."""
    return GenerationResult(
      texts=self.texts,
      token_ids=self.token_ids,
      finish_reasons=[
        "stop" if tokens[-1] in self.stop_tokens else "length"
        for tokens in self.token_ids
      ],
      prompt_tokens=[len(ids) for ids in self.encoded],
      prefill_levels=self.prefill_levels,
      trace=self._trace(),
      time_to_first_token=self.prefill_seconds,
      decode_seconds=self.decode_seconds,
      decode_steps=self.decode_steps,
      compile_seconds=(
        self.model.programs.compile_seconds - self.compiled_before
      ),
    )

  def _trace(self):
    """Levels of the steps that made a token; the first came from prefill."""
    steps = max(len(tokens) for tokens in self.token_ids) - 1
    layers, requests = self.prefill_levels.shape
    empty = np.zeros((0, layers, requests), np.int32)
    trace = np.concatenate([empty, *self.bits])[:steps].copy()
    for request, tokens in enumerate(self.token_ids):
      trace[len(tokens) - 1 :, :, request] = 0
    return trace
