"""One HTTP request's sequences, from the event loop's side."""

import asyncio
from collections.abc import AsyncIterator

from autoematic_jax.serving import responses
from autoematic_jax.serving.engine import Engine
from autoematic_jax.serving.engine import random_seed
from autoematic_jax.serving.errors import RequestError
from autoematic_jax.serving.protocol import ChatRequest
from autoematic_jax.serving.protocol import CompletionRequest
from autoematic_jax.serving.sequences import Output
from autoematic_jax.serving.sequences import SamplingParams
from autoematic_jax.serving.sequences import Sequence

_ENDED_BY_SERVER = ("error", "abort")


class Generation:
  """The choices of a request: `n` for each prompt, in order.

  Attributes:
    prompts: Token ids.
    sequences: Those in the engine.
  """

  def __init__(
    self,
    engine: Engine,
    request: CompletionRequest | ChatRequest,
    prompts: list[list[int]],
    echoed: list[str] | None,
  ):
    self.prompts = prompts
    self._engine = engine
    self._echoed = echoed
    self._choices = request.n
    self._queue: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
    self._used = {"generated": 0, "cached": 0}
    forced = engine.precision(request.precision)
    loop = asyncio.get_running_loop()
    seed = random_seed() if request.seed is None else request.seed

    def emitter(index):
      def emit(output):
        # The loop is closed where the server stopped before the engine.
        if not loop.is_closed():
          loop.call_soon_threadsafe(self._queue.put_nowait, (index, output))

      return emit

    self.sequences: list[Sequence] = []
    for index in range(len(prompts) * request.n):
      params = _params(request, engine, seed, index % request.n)
      prompt = prompts[index // request.n]
      self.sequences.append(
        engine.submit(prompt, params, forced, emitter(index))
      )

  async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
    """Outputs of all choices as they come, until each has ended.

    Raises:
      RequestError: The server ended one: it stops, or failed.
    """
    left = len(self.sequences)
    if self._echoed is not None:
      for index in range(left):
        yield index, Output(text=self._echoed[index // self._choices])
    while left:
      index, output = await self._queue.get()
      if output.finish_reason in _ENDED_BY_SERVER:
        failed = output.finish_reason == "error"
        raise RequestError(
          500 if failed else 503,
          "the engine failed" if failed else "the server is shutting down",
        )
      self._used["generated"] += len(output.tokens)
      if output.finish_reason is not None:
        left -= 1
        if index % self._choices == 0:
          self._used["cached"] += output.cached_tokens
      yield index, output

  async def whole(self) -> list[Output]:
    """Each choice, once all have ended."""
    parts: list[list[Output]] = [[] for _ in self.sequences]
    async for index, output in self.outputs():
      parts[index].append(output)
    return [responses.joined(outputs) for outputs in parts]

  def usage(self) -> dict:
    """Tokens so far."""
    lengths = [len(prompt) for prompt in self.prompts]
    return responses.usage(
      lengths, self._used["generated"], self._used["cached"]
    )

  def abort(self) -> None:
    """Lets all of it go."""
    for sequence in self.sequences:
      self._engine.abort(sequence)


def _params(request, engine, seed, choice) -> SamplingParams:
  chat = isinstance(request, ChatRequest)
  limit = request.max_tokens
  if chat:
    limit = request.max_completion_tokens or limit
  if limit is None:
    limit = engine.config.max_tokens
  top = request.logprobs
  if chat:
    top = (request.top_logprobs or 0) if request.logprobs else None
  bias = request.logit_bias or {}
  vocab = engine.model.config.vocab_size
  if any(not 0 <= token < vocab for token in bias):
    raise RequestError(
      400,
      f"a token id is outside the vocabulary of {vocab}",
      param="logit_bias",
    )
  return SamplingParams(
    max_new_tokens=limit,
    temperature=request.temperature,
    top_p=request.top_p,
    top_k=max(request.top_k, 0),
    min_p=request.min_p,
    seed=seed,
    choice=choice,
    frequency_penalty=request.frequency_penalty,
    presence_penalty=request.presence_penalty,
    logit_bias=bias,
    stop=request.stops,
    logprobs=top,
    prompt_logprobs=not chat and request.echo and top is not None,
    ignore_eos=request.ignore_eos,
  )
