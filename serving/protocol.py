"""Bodies of requests, as OpenAI's API has them."""

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

from autoematic_jax.serving.errors import RequestError

MAX_CHOICES = 16
MAX_PROMPTS = 64

Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(strict=True)]


class StreamOptions(pydantic.BaseModel):
  """Options of a stream."""

  include_usage: bool = False


class SamplingRequest(pydantic.BaseModel):
  """What completions and chats share; `precision` is this server's own."""

  model: str | None = None
  temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
  top_p: float = Field(1.0, gt=0, le=1)
  top_k: int = Field(0, ge=-1)
  min_p: float = Field(0.0, ge=0, le=1)
  seed: int | None = Field(None, ge=0, lt=2**63)
  n: int = Field(1, ge=1, le=MAX_CHOICES)
  stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
  frequency_penalty: float = Field(0.0, ge=-2, le=2)
  presence_penalty: float = Field(0.0, ge=-2, le=2)
  logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = (
    Field(None, max_length=1024)
  )
  ignore_eos: bool = False
  stream: bool = False
  stream_options: StreamOptions | None = None
  precision: Literal["adaptive", "bf16", "fp32"] | int | list[int] | None = None

  @pydantic.model_validator(mode="after")
  def _options_need_a_stream(self):
    if self.stream_options is not None and not self.stream:
      raise ValueError("stream_options needs stream=true")
    return self

  @property
  def stops(self) -> tuple[str, ...]:
    """Stop strings."""
    if self.stop is None:
      return ()
    return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

  @property
  def include_usage(self) -> bool:
    """Whether a stream ends with what it used."""
    return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingRequest):
  """Body of /v1/completions."""

  prompt: (
    str
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[
      list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS)
    ]
  )
  max_tokens: int | None = Field(16, ge=0)
  echo: bool = False
  logprobs: int | None = Field(None, ge=0, le=20)

  @pydantic.model_validator(mode="after")
  def _something_is_asked_for(self):
    if self.max_tokens == 0 and not self.echo:
      raise ValueError("max_tokens=0 needs echo=true")
    return self


class Message(pydantic.BaseModel):
  """One message of a chat; what else it holds goes to the template."""

  model_config = pydantic.ConfigDict(extra="allow")

  role: str
  content: str | list[dict[str, Any]] | None = None


class ChatRequest(SamplingRequest):
  """Body of /v1/chat/completions."""

  messages: list[Message] = Field(min_length=1)
  max_tokens: int | None = Field(None, ge=1)
  max_completion_tokens: int | None = Field(None, ge=1)
  logprobs: bool = False
  top_logprobs: int | None = Field(None, ge=0, le=20)

  @pydantic.model_validator(mode="after")
  def _top_needs_logprobs(self):
    if self.top_logprobs is not None and not self.logprobs:
      raise ValueError("top_logprobs needs logprobs=true")
    return self

  def template_messages(self) -> list[dict[str, Any]]:
    """Messages for the template, text parts joined.

    Raises:
      RequestError: A part is not text.
    """
    return [
      {**message.model_dump(), "content": _text(message.content)}
      for message in self.messages
    ]


def _text(content):
  if not isinstance(content, list):
    return content or ""
  if not all(isinstance(part.get("text"), str) for part in content):
    raise RequestError(400, "only text content is supported", param="messages")
  return "".join(part["text"] for part in content)


class TokenizeRequest(pydantic.BaseModel):
  """Body of /tokenize."""

  model: str | None = None
  prompt: str
  add_special_tokens: bool = True


class DetokenizeRequest(pydantic.BaseModel):
  """Body of /detokenize."""

  model: str | None = None
  tokens: list[TokenId]


Body = TypeVar("Body", bound=pydantic.BaseModel)


def parse(kind: type[Body], data: bytes) -> Body:
  """Reads a body.

  Raises:
    RequestError: It is not JSON, or a value is refused. The message names the
      first such place and never holds what was sent.
  """
  try:
    return kind.model_validate_json(data)
  except pydantic.ValidationError as error:
    first = error.errors(
      include_url=False, include_context=False, include_input=False
    )[0]
    place = ".".join(str(part) for part in first["loc"][:4])
    message = f"{place}: {first['msg']}" if place else first["msg"]
    param = str(first["loc"][0]) if first["loc"] else None
    raise RequestError(400, message, param=param) from None


Kind = Literal["completion", "chat"]
