"""The routes of the server."""

import asyncio
import hmac
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response
from starlette.responses import StreamingResponse
from starlette.routing import Route

import autoematic_jax
from autoematic_jax.errors import AutoematicError
from autoematic_jax.serving import errors
from autoematic_jax.serving import protocol
from autoematic_jax.serving import responses
from autoematic_jax.serving.engine import Engine
from autoematic_jax.serving.errors import RequestError
from autoematic_jax.serving.generation import Generation

_OPEN = ("/health", "/metrics", "/version")


class Api:
  """Handlers over one engine.

  Attributes:
    engine: What runs the requests.
    name: Of the model, to clients.
  """

  def __init__(self, engine: Engine, name: str):
    self.engine = engine
    self.name = name

  def app(self) -> Starlette:
    """The ASGI application."""
    post, get = ["POST"], ["GET"]
    return Starlette(
      routes=[
        Route("/v1/completions", self.guarded(self.completions), methods=post),
        Route("/v1/chat/completions", self.guarded(self.chat), methods=post),
        Route("/v1/models", self.guarded(self.models), methods=get),
        Route("/tokenize", self.guarded(self.tokenize), methods=post),
        Route("/detokenize", self.guarded(self.detokenize), methods=post),
        Route("/health", self.health, methods=get),
        Route("/metrics", self.metrics, methods=get),
        Route("/version", self.version, methods=get),
      ],
      exception_handlers={404: _unknown, 405: _unknown},
    )

  def guarded(self, handler):
    """A handler behind the key, whose errors have the API's form."""

    async def handle(request: Request) -> Response:
      try:
        self._check_key(request)
        return await handler(request)
      except RequestError as error:
        return errors.response(error)
      except AutoematicError as error:
        return errors.response(RequestError(400, str(error)))

    return handle

  def _check_key(self, request):
    key = self.engine.config.api_key
    if key is None:
      return
    given = request.headers.get("authorization", "")
    # Bytes: compare_digest takes no other characters than ASCII in text.
    if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
      raise RequestError(
        401,
        "the API key is missing or wrong",
        headers={"www-authenticate": "Bearer"},
      )

  async def _parse(self, request, kind):
    parsed = protocol.parse(kind, await self._body(request))
    if parsed.model is not None and parsed.model != self.name:
      raise RequestError(
        404, f"this server has one model, {self.name!r}", param="model"
      )
    return parsed

  async def _body(self, request):
    limit = self.engine.config.body_bytes
    parts, size = [], 0
    async for part in request.stream():
      size += len(part)
      if size > limit:
        raise RequestError(
          413,
          f"the body is larger than {limit} bytes",
          headers={"connection": "close"},
        )
      parts.append(part)
    return b"".join(parts)

  def _check_open(self):
    engine = self.engine
    if engine.failure is not None:
      raise RequestError(503, "the engine failed")
    if engine.draining:
      raise RequestError(503, "the server is shutting down")
    if engine.queued >= engine.config.max_waiting:
      raise RequestError(
        429,
        f"{engine.config.max_waiting} requests are waiting",
        headers={"retry-after": "1"},
      )

  async def completions(self, request: Request) -> Response:
    """POST /v1/completions."""
    asked = await self._parse(request, protocol.CompletionRequest)
    self._check_open()
    prompts = await run_in_threadpool(self._encode, asked)
    echoed = None
    if asked.echo:
      decode = self.engine.model.tokenizer.decode
      texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
      echoed = [
        text if isinstance(text, str) else decode(ids)
        for text, ids in zip(texts, prompts, strict=False)
      ]
      if len(echoed) != len(prompts):
        echoed = [decode(ids) for ids in prompts]
    return await self._answer(request, "completion", asked, prompts, echoed)

  def _encode(self, asked):
    prompt = asked.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
      prompt = [prompt]
    encode = self.engine.model.tokenizer.encode
    prompts = [
      encode(item) if isinstance(item, str) else list(item) for item in prompt
    ]
    for ids in prompts:
      self.engine.check(ids, asked.max_tokens != 0)
    return prompts

  async def chat(self, request: Request) -> Response:
    """POST /v1/chat/completions."""
    asked = await self._parse(request, protocol.ChatRequest)
    self._check_open()
    ids = await run_in_threadpool(
      self.engine.model.tokenizer.encode_chat, asked.template_messages()
    )
    self.engine.check(ids, 1)
    return await self._answer(request, "chat", asked, [ids], None)

  async def _answer(self, request, kind, asked, prompts, echoed):
    generation = Generation(self.engine, asked, prompts, echoed)
    tokenizer = self.engine.model.tokenizer
    formatter = responses.Formatter(kind, self.name, tokenizer)
    if asked.stream:
      return StreamingResponse(
        _stream(generation, formatter, asked.include_usage),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache"},
      )
    outputs = await _unless_gone(request, generation)
    return JSONResponse(formatter.whole(outputs, generation.usage()))

  async def models(self, _: Request) -> Response:
    """GET /v1/models."""
    model = {
      "id": self.name,
      "object": "model",
      "created": 0,
      "owned_by": "autoematic",
      "max_model_len": self.engine.config.max_tokens,
    }
    return JSONResponse({"object": "list", "data": [model]})

  async def tokenize(self, request: Request) -> Response:
    """POST /tokenize."""
    asked = await self._parse(request, protocol.TokenizeRequest)
    tokens = await run_in_threadpool(
      self.engine.model.tokenizer.encode,
      asked.prompt,
      add_special_tokens=asked.add_special_tokens,
    )
    limit = self.engine.config.max_tokens
    return JSONResponse(
      {"tokens": tokens, "count": len(tokens), "max_model_len": limit}
    )

  async def detokenize(self, request: Request) -> Response:
    """POST /detokenize."""
    asked = await self._parse(request, protocol.DetokenizeRequest)
    vocab = self.engine.model.config.vocab_size
    if any(not 0 <= token < vocab for token in asked.tokens):
      raise RequestError(
        400, f"a token id is outside the vocabulary of {vocab}", param="tokens"
      )
    text = self.engine.model.tokenizer.decode(asked.tokens)
    return JSONResponse({"prompt": text})

  async def health(self, _: Request) -> Response:
    """GET /health: 503 once the engine is dead."""
    return Response(status_code=200 if self.engine.failure is None else 503)

  async def metrics(self, _: Request) -> Response:
    """GET /metrics, in Prometheus' format."""
    return Response(
      self.engine.metrics.render(),
      media_type="text/plain; version=0.0.4; charset=utf-8",
    )

  async def version(self, _: Request) -> Response:
    """GET /version."""
    return JSONResponse({"version": autoematic_jax.__version__})


async def _unknown(request: Request, error: Exception) -> Response:
  status = getattr(error, "status_code", 404)
  message = "there is no such route" if status == 404 else "wrong method"
  return errors.response(RequestError(status, message))


async def _stream(
  generation: Generation, formatter: responses.Formatter, include_usage: bool
) -> AsyncIterator[bytes]:
  try:
    if formatter.kind == "chat":
      for index in range(len(generation.sequences)):
        yield formatter.role_chunk(index)
    async for index, output in generation.outputs():
      if output.text or output.logprobs or output.finish_reason:
        yield formatter.chunk(index, output)
    if include_usage:
      yield formatter.usage_chunk(generation.usage())
  except RequestError as error:
    # The status is sent; only a frame can say it.
    yield responses.frame(errors.body(error.status, str(error), error.param))
  finally:
    generation.abort()
  yield responses.DONE


async def _unless_gone(request: Request, generation: Generation):
  """All outputs; gives up once the client went away."""
  work = asyncio.ensure_future(generation.whole())
  gone = asyncio.ensure_future(_disconnected(request))
  try:
    await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
      raise RequestError(400, "the client went away")
    return work.result()
  finally:
    generation.abort()
    work.cancel()
    gone.cancel()


async def _disconnected(request: Request) -> None:
  while (await request.receive())["type"] != "http.disconnect":
    pass
