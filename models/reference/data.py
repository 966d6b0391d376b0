"""Training windows: problems and text, the same for the same seed.

A chunk is what one dispatch to the device trains on. Every chunk follows from
the seed and its number, so that any process can make it, and a run that
continues sees what an unbroken one would have seen.
"""

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Generator, Iterator
from typing import NamedTuple

import numpy as np
import tokenizers

from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import vocabulary

# Problems drawn at a time, so that the tokenizer is called for many at once.
_DRAW = 512

# More problems than a chunk can hold, so that chunks share no seed.
_SEEDS_PER_CHUNK = 2**20

_SEEDS_PER_RUN = 2**44


class Chunk(NamedTuple):
  """What one dispatch trains on: `steps` batches of windows.

  Attributes:
    tokens: `[steps, batch, window + 1]`; the last of a window is only
      predicted.
    counted: `[steps, batch, window]`, whether the prediction of the next
      token counts: in text and answers, not in prompts.
  """

  tokens: np.ndarray
  counted: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
  """What windows hold.

  Attributes:
    seed: Of everything random.
    steps: Steps of a chunk.
    batch: Windows of a step.
    window: Predictions of a window.
    text_share: Share of the windows that hold text; the rest hold problems.
  """

  seed: int = 0
  steps: int = 8
  batch: int = 128
  window: int = 512
  text_share: float = 0.3


def limited_text_share(
  share: float, *, text_tokens: int, all_tokens: int, epochs: float
) -> float:
  """The share of text, lowered so that no text is seen too often.

  Args:
    share: What is wished for.
    text_tokens: Tokens of text that there are.
    all_tokens: Tokens of the whole training.
    epochs: How often the text may be seen.
  """
  return min(share, epochs * text_tokens / max(1, all_tokens))


class ChunkMaker:
  """Makes chunks by their number.

  Args:
    mixture: What they hold.
    tokenizer: Encodes problems.
    text: Tokens of all articles in one row; longer than a window unless
      there is no text.
  """

  def __init__(
    self,
    mixture: Mixture,
    tokenizer: tokenizers.Tokenizer,
    text: np.ndarray,
  ):
    if mixture.text_share and len(text) <= mixture.window:
      raise ValueError(
        f"{len(text)} tokens of text do not fill a window of {mixture.window}"
      )
    self._mixture = mixture
    self._tokenizer = tokenizer
    self._text = text
    self._excluded = tasks.held_out_hashes()

  def make(self, number: int) -> Chunk:
    """The chunk of a number."""
    mixture = self._mixture
    rng = np.random.default_rng([mixture.seed, number])
    rows = mixture.steps * mixture.batch
    width = mixture.window + 1
    tokens = np.empty((rows, width), np.uint16)
    counted = np.ones((rows, width), bool)
    is_text = rng.random(rows) < mixture.text_share
    for row in np.flatnonzero(is_text):
      start = rng.integers(len(self._text) - mixture.window)
      tokens[row] = self._text[start : start + width]
    stream = self._problem_tokens(number)
    for row in np.flatnonzero(~is_text):
      tokens[row], counted[row] = _window(stream, width)
    shape = mixture.steps, mixture.batch
    return Chunk(
      tokens.reshape(*shape, width),
      # A prediction counts by the token that it predicts.
      counted[:, 1:].reshape(*shape, mixture.window),
    )

  def _problem_tokens(
    self, number: int
  ) -> Iterator[tuple[list[int], list[bool]]]:
    """Tokens of problem after problem, and which of them count."""
    start = self._mixture.seed * _SEEDS_PER_RUN + number * _SEEDS_PER_CHUNK
    end = start + _SEEDS_PER_CHUNK
    for first in range(start, end, _DRAW):
      seeds = range(first, first + _DRAW)
      problems = list(tasks.training_problems(seeds, self._excluded))
      prompts = vocabulary.encode_prompts(
        self._tokenizer, [p.prompt for p in problems]
      )
      answers = vocabulary.encode_answers(self._tokenizer, problems)
      for prompt, answer in zip(prompts, answers, strict=True):
        yield (
          prompt + answer,
          [False] * len(prompt) + [True] * len(answer),
        )
    raise ValueError("a chunk needs more problems than it has seeds for")


def _window(stream, width: int) -> tuple[list[int], list[bool]]:
  """One window; each begins with a whole problem and cuts off its last."""
  tokens: list[int] = []
  counted: list[bool] = []
  while len(tokens) < width:
    more, count = next(stream)
    tokens += more
    counted += count
  return tokens[:width], counted[:width]


def load_chunks(
  mixture: Mixture,
  tokenizer_json: str,
  text: np.ndarray,
  *,
  first: int,
  last: int,
  workers: int,
) -> Generator[Chunk, None, None]:
  """Chunks in order, made ahead in the background.

  Args:
    mixture: What they hold.
    tokenizer_json: The tokenizer, as its file has it.
    text: Tokens of all articles in one row.
    first: Number of the first chunk.
    last: Number after the last.
    workers: Processes that make chunks; 0 makes them in a thread.
  """
  arguments = (mixture, tokenizer_json, text)
  if workers:
    executor = concurrent.futures.ProcessPoolExecutor(
      workers,
      # A fork would copy JAX's threads in whatever state they are.
      mp_context=multiprocessing.get_context("spawn"),
      initializer=_start_worker,
      initargs=arguments,
    )
  else:
    executor = concurrent.futures.ThreadPoolExecutor(
      1, initializer=_start_worker, initargs=arguments
    )
  waiting: collections.deque = collections.deque()
  try:
    for number in range(first, last):
      waiting.append(executor.submit(_make, number))
      if len(waiting) > 2 * max(1, workers):
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  finally:
    executor.shutdown(wait=True, cancel_futures=True)


# What a worker keeps between chunks; of its own, be it thread or process.
_worker = threading.local()


def _start_worker(mixture, tokenizer_json, text) -> None:
  # As many processes as wanted run already.
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
  _worker.maker = ChunkMaker(mixture, tokenizer, text)


def _make(number: int) -> Chunk:
  return _worker.maker.make(number)
