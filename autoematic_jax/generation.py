"""Generating text with the precision of every layer chosen at run time."""

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax import programs
from autoematic_jax.errors import PrecisionError
from autoematic_jax.errors import PromptError
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.models.transformer import ADAPTIVE
from autoematic_jax.sampling import SamplingArrays
from autoematic_jax.sampling import SamplingConfig

Precision = str | int | Sequence[int]
Messages = Sequence[dict[str, Any]]
Prompt = str | Sequence[int] | Messages

_DENSE_BITS = {"bf16": 16, "fp32": 32}

STEPS_PER_CALL = 8
"""Decode steps between two looks at the result by the host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextChunk:
  """New text of one request while it streams.

  Attributes:
    request: Index of the prompt.
    text: Text that became certain since the last chunk.
    token_ids: Tokens that it came from.
  """

  request: int
  text: str
  token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
  """What `generate` returns for a batch of R prompts.

  Attributes:
    texts: Generated text of each request, without stop tokens.
    token_ids: Generated tokens of each request, stop token included.
    finish_reasons: `stop` or `length` for each request.
    prompt_tokens: Length of each prompt.
    prefill_levels: `[layers, R]` bits of each layer in prefill.
    trace: `[steps, layers, R]` bits of each layer in each decode step; 0
      where a request had already ended.
    time_to_first_token: Seconds of prefill, without compilation.
    decode_seconds: Seconds of all decode steps, without compilation.
    decode_steps: Steps that `decode_seconds` covers, unread ones included.
    compile_seconds: Seconds of compilation in this call.
  """

  texts: list[str]
  token_ids: list[list[int]]
  finish_reasons: list[str]
  prompt_tokens: list[int]
  prefill_levels: np.ndarray
  trace: np.ndarray
  time_to_first_token: float
  decode_seconds: float
  decode_steps: int
  compile_seconds: float

  @property
  def text(self) -> str:
    """Text of the only request."""
    if len(self.texts) != 1:
      raise PromptError(f"the result holds {len(self.texts)} texts; use .texts")
    return self.texts[0]

  @property
  def decode_tokens_per_second(self) -> float:
    """Steps a second times requests, stopped ones included."""
    if not self.decode_seconds:
      return 0.0
    return self.decode_steps * len(self.texts) / self.decode_seconds


def generate(
  model: LanguageModel,
  prompts: Prompt | Sequence[Prompt],
  *,
  max_new_tokens: int = 64,
  precision: Precision | None = None,
  chat: bool = False,
  sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
  stop_token_ids: Sequence[int] = (),
  ignore_eos: bool = False,
) -> GenerationResult:
  """Generates text for one or many prompts of any lengths.

  A request's tokens do not depend on the prompts beside it.

  Args:
    model: From `autoematic_jax.load`.
    prompts: A text, token ids, chat messages, or a list of those.
    max_new_tokens: Tokens to generate at most for each prompt.
    precision: `adaptive`, one level in bits, one level for each layer, or
      `bf16` / `fp32` for an unquantized checkpoint. None takes `adaptive`
      where the checkpoint offers several levels, else its only precision.
    chat: Wraps each text prompt as a user's message of the chat template.
    sampling: One setting for all prompts, or one for each; greedy by default.
    stop_token_ids: Tokens that end a request besides the model's own.
    ignore_eos: Whether to go on past the model's own end tokens.

  Returns:
    Texts, tokens and the trace of precisions.

  Raises:
    PromptError: An empty prompt, one longer than the context, or settings
      that do not fit.
    PrecisionError: A precision that the checkpoint does not offer.
  """
  streaming = stream(
    model,
    prompts,
    max_new_tokens=max_new_tokens,
    precision=precision,
    chat=chat,
    sampling=sampling,
    stop_token_ids=stop_token_ids,
    ignore_eos=ignore_eos,
  )
  while True:
    try:
      next(streaming)
    except StopIteration as end:
      return end.value


def stream(
  model: LanguageModel,
  prompts: Prompt | Sequence[Prompt],
  *,
  max_new_tokens: int = 64,
  precision: Precision | None = None,
  chat: bool = False,
  sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
  stop_token_ids: Sequence[int] = (),
  ignore_eos: bool = False,
) -> Generator[TextChunk, None, GenerationResult]:
  """`generate` that yields text as it is made and returns the result."""
  encoded = [
    encode_prompt(model, prompt, chat=chat) for prompt in _as_list(prompts)
  ]
  if not encoded:
    raise PromptError("no prompt was given")
  if max_new_tokens < 1:
    raise PromptError(f"max_new_tokens={max_new_tokens} must be >= 1")
  stop = set(stop_token_ids) | (set() if ignore_eos else set(model.eos_ids))
  run = _Run(
    model,
    encoded,
    max_new_tokens=max_new_tokens,
    forced=forced_levels(model, precision),
    sampling=_per_request(sampling, len(encoded)),
    stop_tokens=sorted(stop),
  )
  return _stream(run)


def _stream(run: "_Run") -> Generator[TextChunk, None, GenerationResult]:
  yield from run.prefill()
  while not run.finished:
    yield from run.decode()
  yield from run.flush()
  return run.result()


def _as_list(prompts) -> list[Prompt]:
  if isinstance(prompts, str):
    return [prompts]
  prompts = list(prompts)
  if prompts and isinstance(prompts[0], int | np.integer | dict):
    return [prompts]
  return prompts


def _per_request(sampling, count) -> list[SamplingConfig]:
  if sampling is None:
    sampling = SamplingConfig()
  if isinstance(sampling, SamplingConfig):
    return [sampling] * count
  if len(sampling) != count:
    raise PromptError(
      f"{len(sampling)} sampling settings were given for {count} prompts"
    )
  return list(sampling)


def encode_prompt(
  model: LanguageModel, prompt: Prompt, *, chat: bool
) -> list[int]:
  """Token ids of a prompt, checked against the vocabulary and the context.

  Raises:
    PromptError: The prompt is empty, holds an unknown id, or leaves no room
      for a new token.
  """
  if isinstance(prompt, str) and chat:
    prompt = [{"role": "user", "content": prompt}]
  if isinstance(prompt, str):
    ids = model.tokenizer.encode(prompt)
  elif prompt and isinstance(prompt[0], dict):
    ids = model.tokenizer.encode_chat(cast(Messages, prompt))
  else:
    ids = [int(token) for token in cast(Sequence[int], prompt)]
  if not ids:
    raise PromptError("a prompt is empty: it has no tokens")
  vocab = model.config.vocab_size
  outside = [token for token in ids if not 0 <= token < vocab]
  if outside:
    raise PromptError(
      f"token id {outside[0]} is outside the vocabulary of {vocab}"
    )
  if len(ids) >= model.config.max_positions:
    raise PromptError(
      f"a prompt has {len(ids)} tokens; the model's context is"
      f" {model.config.max_positions}, the answer included"
    )
  return ids


def forced_levels(
  model: LanguageModel, precision: Precision | None
) -> np.ndarray:
  """Bits of each layer, or ADAPTIVE everywhere, as `[layers]` int32.

  Raises:
    PrecisionError: The checkpoint does not offer this precision.
  """
  layers = model.config.num_layers
  offered = model.precisions
  if precision is None:
    precision = offered[0]
  if isinstance(precision, str) and precision.isdecimal():
    precision = int(precision)
  if isinstance(precision, str | int | np.integer):
    if precision not in offered:
      raise PrecisionError(
        f"precision {precision!r} is not offered by this {model.format}"
        f" checkpoint; offered: {', '.join(map(str, offered))}"
      )
    if precision == "adaptive":
      return np.full((layers,), ADAPTIVE, np.int32)
    bits = _DENSE_BITS[precision] if isinstance(precision, str) else precision
    return np.full((layers,), bits, np.int32)
  levels = np.asarray(list(precision), np.int32)
  unknown = sorted(set(levels.tolist()) - set(model.levels))
  if levels.shape != (layers,) or unknown:
    raise PrecisionError(
      f"a level for each layer needs {layers} values out of {model.levels};"
      f" got {len(levels)} values, {unknown} not offered"
    )
  return levels


def _bucket(count: int, smallest: int = 32) -> int:
  """The next of 32, 48, 64, 96, 128, 192, ... so that few shapes compile."""
  size = smallest
  while size < count:
    if size * 3 // 2 >= count:
      return size * 3 // 2
    size *= 2
  return size


class _Run:
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
    padded = _bucket(max(lengths))
    tokens = np.zeros((len(lengths), padded), np.int32)
    for row, ids in zip(tokens, self.encoded, strict=True):
      row[: len(ids)] = ids
    capacity = max(
      length + limit for length, limit in zip(lengths, self.limits, strict=True)
    )
    cache = _cache(
      self.model,
      len(lengths),
      max(capacity + STEPS_PER_CALL, padded),
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


def _cache(model, batch, capacity):
  """An empty cache in the format of the precision that runs."""
  config = model.config
  if model.format == "fp6g":
    codec = kv_codecs.FP6gCodec()
  elif model.levels:
    codec = kv_codecs.AutoFPCodec(model.decoding)
  else:
    codec = kv_codecs.DenseCodec(str(model.dtype))
  return kv_cache.init_cache(
    num_layers=config.num_layers,
    batch=batch,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    capacity=capacity,
    codec=codec,
  )
