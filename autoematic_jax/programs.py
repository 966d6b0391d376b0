"""The compiled programs of generation: one prefill pass, a run of steps."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax import kv_cache
from autoematic_jax import policy as policy_lib
from autoematic_jax import sampling as sampling_lib
from autoematic_jax import signals
from autoematic_jax.models.transformer import Decoder

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """Everything that one decode step hands to the next.

  Attributes:
    token: `[B]` token to feed next.
    position: `[B]` its position.
    entropy: `[B]` normalized entropy of the logits that `token` came from.
    done: `[B]` whether the request has produced a stop token.
    cache: Packed keys and values of the positions before.
    policy: The policy's state.
  """

  token: Int[Array, "B"]
  position: Int[Array, "B"]
  entropy: Float[Array, "B"]
  done: Bool[Array, "B"]
  cache: kv_cache.Cache
  policy: policy_lib.PolicyState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What a program is specialized on besides shapes."""

  policy: policy_lib.PolicyConfig
  greedy: bool
  steps: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Per-batch inputs that do not change between steps.

  Attributes:
    forced: `[L]` bits of each layer, or -1 where the policy decides.
    stop_tokens: `[S]` ids that end a request, padded with -1.
    sampling: The requests' sampling settings.
  """

  forced: Int[Array, "L"]
  stop_tokens: Int[Array, "S"]
  sampling: sampling_lib.SamplingArrays


def prefill(
  model: Decoder,
  tokens: Int[Array, "B T"],
  lengths: Int[Array, "B"],
  cache: kv_cache.Cache,
  request: Request,
  settings: Settings,
) -> tuple[DecodeState, Int[Array, "L B"]]:
  """Runs the prompts and draws the first token of each request.

  Args:
    model: The decoder.
    tokens: Prompts, padded at the end.
    lengths: Tokens of each prompt.
    cache: An empty cache.
    request: Levels, stop tokens and sampling.
    settings: Static settings.

  Returns:
    The state before the first decode step, and the bits of each layer.
  """
  batch = tokens.shape[0]
  hidden, cache, _, trace = model.run_layers(
    tokens,
    start=jnp.zeros((batch,), jnp.int32),
    lengths=lengths,
    cache=cache,
    policy=policy_lib.start_prefill(settings.policy, batch),
    forced=request.forced,
    policy_config=settings.policy,
    phase="prefill",
  )
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
  logits = model.logits(last[:, 0])
  token, entropy, done = _choose(logits, lengths, request, settings)
  state = DecodeState(
    token=token,
    position=lengths,
    entropy=entropy,
    done=done,
    cache=cache,
    policy=policy_lib.start_decode(settings.policy, batch),
  )
  return state, trace.bits


def decode(
  model: Decoder, state: DecodeState, request: Request, settings: Settings
) -> tuple[DecodeState, tuple[Int[Array, "N B"], Int[Array, "N L B"]]]:
  """Runs `settings.steps` decode steps in one scan.

  Returns:
    The state after them, and for each step the token drawn (-1 once a request
    is done) and the bits of each layer.
  """

  def step(state, _):
    hidden, cache, policy, trace = model.run_layers(
      state.token[:, None],
      start=state.position,
      lengths=jnp.ones_like(state.position),
      cache=state.cache,
      policy=policy_lib.start_step(
        settings.policy, state.policy, state.entropy
      ),
      forced=request.forced,
      policy_config=settings.policy,
      phase="decode",
    )
    logits = model.logits(hidden[:, 0])
    position = jnp.where(state.done, state.position, state.position + 1)
    token, entropy, done = _choose(logits, position, request, settings)
    drawn = jnp.where(state.done, NO_TOKEN, token)
    state = DecodeState(
      token=jnp.where(state.done, state.token, token),
      position=position,
      entropy=entropy,
      done=state.done | done,
      cache=cache,
      policy=policy,
    )
    return state, (drawn, trace.bits)

  return lax.scan(step, state, None, length=settings.steps)


def _choose(logits, position, request, settings):
  token = sampling_lib.sample(
    logits, request.sampling, position, greedy=settings.greedy
  )
  entropy = signals.topk_entropy(logits, settings.policy.entropy_top_k)
  done = jnp.any(token[:, None] == request.stop_tokens[None], axis=1)
  return token, entropy, done


class Programs:
  """Compiles a program once for each shape and remembers how long it took.

  Attributes:
    compile_seconds: Time spent compiling so far.
  """

  def __init__(self):
    self.compile_seconds = 0.0
    self._compiled: dict[Any, Any] = {}
    self._prefill = jax.jit(
      prefill, static_argnames="settings", donate_argnames="cache"
    )
    self._decode = jax.jit(
      decode, static_argnames="settings", donate_argnames="state"
    )

  def prefill(self, model, tokens, lengths, cache, request, settings):
    """Compiled `prefill`; the cache's buffers are reused."""
    arguments = (model, tokens, lengths, cache, request)
    return self._run(self._prefill, arguments, settings)

  def decode(self, model, state, request, settings):
    """Compiled `decode`; the state's buffers are reused."""
    return self._run(self._decode, (model, state, request), settings)

  def _run(self, function, arguments, settings):
    key = (function is self._prefill, settings, _signature(arguments[1:]))
    if key not in self._compiled:
      start = time.perf_counter()
      lowered = function.lower(*arguments, settings=settings)
      self._compiled[key] = lowered.compile()
      self.compile_seconds += time.perf_counter() - start
    return self._compiled[key](*arguments)


def _signature(arguments):
  leaves, structure = jax.tree.flatten(arguments)
  return structure, tuple((x.shape, x.dtype) for x in leaves)
