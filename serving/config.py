"""What a server is started with."""

import dataclasses

from autoematic_jax.errors import AutoematicError
from autoematic_jax.kv_cache import BLOCK
from autoematic_jax.kv_pages import BASE_TOKENS
from autoematic_jax.kv_pages import REFINED_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
  """Limits of a server.

  Attributes:
    max_tokens: Prompt and answer of a request together, at most.
    max_running: Requests in a decode batch, at most.
    max_waiting: Requests in the queue, at most; more are refused.
    chunk: Tokens of a prefill pass; each is a pass of the policy of its own,
      so answers to longer prompts depend on it.
    token_budget: Tokens of a tick, decode steps included; at least one chunk
      runs whenever one waits.
    pages: KV pages of each layer; None is enough for `max_running` requests of
      `max_tokens`.
    prefix_cache: Whether pages of whole chunks are kept for later prompts.
    body_bytes: Largest body of a request.
    api_key: That clients must send; None lets anybody in.
    drain_seconds: What running requests are given to finish on SIGTERM.
  """

  max_tokens: int
  max_running: int = 8
  max_waiting: int = 256
  chunk: int = 128
  token_budget: int = 136
  pages: int | None = None
  prefix_cache: bool = True
  body_bytes: int = 4 << 20
  api_key: str | None = None
  drain_seconds: float = 30.0

  def __post_init__(self):
    for name in ("max_tokens", "max_running", "max_waiting", "token_budget"):
      if getattr(self, name) < 1:
        raise AutoematicError(f"{name}={getattr(self, name)} must be >= 1")
    if self.chunk < 1 or self.chunk % BASE_TOKENS:
      raise AutoematicError(
        f"chunk={self.chunk} must be a multiple of {BASE_TOKENS}, the tokens"
        " of a page"
      )
    if self.pages is not None and self.pages < self.chunk // REFINED_TOKENS:
      raise AutoematicError(
        f"pages={self.pages} must hold a chunk of {self.chunk} tokens:"
        f" {self.chunk // REFINED_TOKENS} pages"
      )

  @property
  def num_pages(self) -> int:
    """KV pages of each layer."""
    if self.pages is not None:
      return self.pages
    return self.max_running * -(-self.max_tokens // REFINED_TOKENS)

  @property
  def lengths(self) -> tuple[int, ...]:
    """Context lengths that programs are compiled for, ascending."""
    longest = -(-self.max_tokens // self.chunk) * self.chunk
    longest = -(-longest // BLOCK) * BLOCK
    lengths, length = [], 2 * BLOCK
    while length < longest:
      lengths.append(length)
      length *= 2
    return (*lengths, longest)

  @property
  def batches(self) -> tuple[int, ...]:
    """Decode batches that programs are compiled for, ascending."""
    sizes, size = [], 1
    while size < self.max_running:
      sizes.append(size)
      size *= 2
    return (*sizes, self.max_running)
