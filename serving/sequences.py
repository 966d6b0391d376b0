"""One choice of one request, from its prompt to its last token."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from autoematic_jax.page_pool import PageTable
from autoematic_jax.serving.detokenizer import Detokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """How a sequence is sampled and when it ends.

  Attributes:
    max_new_tokens: 0 only reads the prompt.
    temperature: 0 takes the most likely token.
    top_p: Only the likeliest tokens that together reach this probability.
    top_k: Only the k likeliest tokens; 0 keeps all.
    min_p: Only tokens at least so likely, relative to the likeliest.
    seed: With the prompt, `choice` and settings it fixes the tokens.
    choice: Index among the choices of a request.
    frequency_penalty: Taken from a token's logit each time it was generated.
    presence_penalty: Taken once it was.
    logit_bias: Added to the logits of tokens.
    stop: Texts that end the answer, themselves left out.
    logprobs: Likeliest tokens to report at each step; None reports nothing.
    prompt_logprobs: Whether to report them for the prompt too.
    ignore_eos: Whether to go on past the model's end tokens.
  """

  max_new_tokens: int
  temperature: float = 0.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  seed: int = 0
  choice: int = 0
  frequency_penalty: float = 0.0
  presence_penalty: float = 0.0
  logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
  stop: tuple[str, ...] = ()
  logprobs: int | None = None
  prompt_logprobs: bool = False
  ignore_eos: bool = False

  @property
  def adjusts(self) -> bool:
    """Whether logits are changed before a token is chosen."""
    return bool(
      self.frequency_penalty or self.presence_penalty or self.logit_bias
    )

  @property
  def needs_logits(self) -> bool:
    """Whether the device's most likely token is not all that is needed."""
    return self.temperature > 0 or self.adjusts or self.logprobs is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
  """Natural logs of probabilities at one position.

  Attributes:
    token: The token that stands there.
    logprob: Its own; None at the first position of a prompt.
    top: The likeliest tokens and theirs, descending.
  """

  token: int
  logprob: float | None
  top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
  """What one step brought to a sequence.

  Attributes:
    text: Text that is certain now.
    tokens: New tokens.
    logprobs: Theirs, and before the first those of the prompt, if asked for.
    finish_reason: `stop`, `length`, `abort` or `error` at the end, else None.
    cached_tokens: Prompt tokens that a prefix hit spared.
  """

  text: str = ""
  tokens: tuple[int, ...] = ()
  logprobs: tuple[TokenLogprobs, ...] = ()
  finish_reason: str | None = None
  cached_tokens: int = 0


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
  """A choice in the engine; the engine's thread alone changes it.

  Attributes:
    prompt: Token ids.
    params: Sampling and stopping.
    forced: `[L]` bits of each layer, or -1 where the policy decides.
    emit: Takes outputs; called on the engine's thread.
    detokenizer: Its text.
    generated: Tokens drawn.
    table: Its pages; None while it waits.
    done: Prompt tokens that went through the model.
    policy: `[S]` its packed policy state.
    entropy: Of the logits of its last token.
    swapped: What its pages held and how many tokens, while preempted.
    keys: Of its prompt's whole chunks in the prefix cache.
    prompt_logprobs: Those found so far.
    aborted: Set by any thread: nobody wants it any more.
    arrived: Time of `time.perf_counter` at which it came; so the others.
  """

  prompt: list[int]
  params: SamplingParams
  forced: Int[np.ndarray, "L"]
  emit: Callable[[Output], None]
  detokenizer: Detokenizer
  generated: list[int] = dataclasses.field(default_factory=list)
  table: PageTable | None = None
  done: int = 0
  cached: int = 0
  policy: Float[np.ndarray, "S"] | None = None
  entropy: float = 0.0
  swapped: tuple | None = None
  keys: list[bytes] = dataclasses.field(default_factory=list)
  prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
  aborted: bool = False
  arrived: float = dataclasses.field(default_factory=time.perf_counter)
  scheduled: float | None = None
  first_token: float | None = None
  last_token: float | None = None

  @property
  def decoding(self) -> bool:
    """Whether its prompt is through."""
    return self.done == len(self.prompt)
