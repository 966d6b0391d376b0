"""What generation hands back."""

import dataclasses

import numpy as np

from autoematic_jax.errors import PromptError


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
