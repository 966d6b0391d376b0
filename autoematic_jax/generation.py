"""Generating text with the precision of every layer chosen at run time."""

from collections.abc import Generator, Sequence

from autoematic_jax.errors import PromptError
from autoematic_jax.generation_run import Run
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.precisions import Precision
from autoematic_jax.precisions import forced_levels
from autoematic_jax.prompts import Prompt
from autoematic_jax.prompts import as_list
from autoematic_jax.prompts import encode_prompt
from autoematic_jax.results import GenerationResult
from autoematic_jax.results import TextChunk
from autoematic_jax.sampling import SamplingConfig


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
    encode_prompt(model, prompt, chat=chat) for prompt in as_list(prompts)
  ]
  if not encoded:
    raise PromptError("no prompt was given")
  if max_new_tokens < 1:
    raise PromptError(f"max_new_tokens={max_new_tokens} must be >= 1")
  stop = set(stop_token_ids) | (set() if ignore_eos else set(model.eos_ids))
  run = Run(
    model,
    encoded,
    max_new_tokens=max_new_tokens,
    forced=forced_levels(model, precision),
    sampling=_per_request(sampling, len(encoded)),
    stop_tokens=sorted(stop),
  )
  return _stream(run)


def _stream(run: "Run") -> Generator[TextChunk, None, GenerationResult]:
  yield from run.prefill()
  while not run.finished:
    yield from run.decode()
  yield from run.flush()
  return run.result()


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
