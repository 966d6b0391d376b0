"""A model going through a recorded conversation, pass by pass."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from autoematic_jax import kv_cache
from autoematic_jax import policy as policy_lib
from autoematic_jax import signals
from autoematic_jax.generation_run import bucket
from autoematic_jax.language_model import LanguageModel
from autoematic_jax.models.transformer import ADAPTIVE
from autoematic_jax.models.transformer import Decoder
from autoematic_jax.models.transformer import Phase
from autoematic_jax.policy import PolicyConfig

Kind = Literal["prefill", "refill", "decode"]
KINDS: tuple[Kind, ...] = ("prefill", "refill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
  """Tokens that go through the layers together.

  Attributes:
    kind: The first turn is a prefill, a later one a refill; each token of an
      answer but its last is a decode step.
    tokens: The new tokens.
    start: Position of the first of them.
  """

  kind: Kind
  tokens: tuple[int, ...]
  start: int

  @property
  def phase(self) -> Phase:
    """Which of the policy's rules apply."""
    return "decode" if self.kind == "decode" else "prefill"

  def padded(self) -> np.ndarray:
    """Tokens in one of a few lengths, so that few shapes compile."""
    count = 1 if self.kind == "decode" else bucket(len(self.tokens))
    tokens = np.zeros((count,), np.int32)
    tokens[: len(self.tokens)] = self.tokens
    return tokens


def turn_pass(
  turn: Sequence[int], before: Pass | None, answer: Sequence[int]
) -> Pass:
  """The pass that reads a turn.

  Args:
    turn: Token ids.
    before: The pass before it; None for the first turn.
    answer: The answer before it. Its last token was drawn but not read yet;
      where a stop token begins the turn as well, it is read once.

  Returns:
    A prefill or a refill.
  """
  if before is None:
    return Pass(kind="prefill", tokens=tuple(turn), start=0)
  last = answer[-1]
  rest = turn[1:] if turn[0] == last else turn
  return Pass(
    kind="refill",
    tokens=(last, *rest),
    start=before.start + len(before.tokens),
  )


def passes_of(
  turns: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Pass]:
  """The passes of a conversation with its answers, in order."""
  passes: list[Pass] = []
  answer: Sequence[int] = ()
  for turn, next_answer in zip(turns, answers, strict=True):
    before = passes[-1] if passes else None
    passes.append(turn_pass(turn, before, answer))
    for token in next_answer[:-1]:
      passes.append(decode_pass(token, passes[-1]))
    answer = next_answer
  return passes


def decode_pass(token: int, before: Pass) -> Pass:
  """The pass that reads one token of an answer."""
  start = before.start + len(before.tokens)
  return Pass(kind="decode", tokens=(token,), start=start)


def capacity_of(passes: Sequence[Pass]) -> int:
  """Positions that a cache needs for some passes, padding included."""
  return max(step.start + len(step.padded()) for step in passes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """What a pass leaves to the next.

  Attributes:
    cache: Keys and values.
    policy: The policy's state of decode, kept over refills.
    entropy: Normalized entropy of the last logits.
  """

  cache: kv_cache.Cache
  policy: policy_lib.PolicyState
  entropy: Float[Array, "1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassOutput:
  """What came out of a pass.

  Attributes:
    log_probabilities: `[V]` of the next token.
    entropy: Normalized entropy of the same (`signals.topk_entropy`).
    levels: `[L]` bits that the layers ran at.
    activity: `[L]` update activity of the layers.
  """

  log_probabilities: Float[Array, "V"]
  entropy: Float[Array, ""]
  levels: Int[Array, "L"]
  activity: Float[Array, "L"]


class Session:
  """One model, under one policy, going through one conversation.

  As in generation, a prefill or refill starts the policy's rules of prefill
  anew; the statistics of decode, which generation keeps over an answer, go on
  through the conversation.

  Args:
    model: Who reads the passes.
    capacity: Positions that the cache must hold, from `capacity_of`.
    policy: Constants of the policy; None takes the model's own.
  """

  def __init__(
    self,
    model: LanguageModel,
    capacity: int,
    policy: PolicyConfig | None = None,
  ):
    self._model = model
    self._policy = policy or model.policy
    self.memory = Memory(
      cache=model.init_cache(1, capacity),
      policy=policy_lib.start_decode(self._policy, 1),
      entropy=jnp.zeros((1,), jnp.float32),
    )

  def run(
    self, step: Pass, forced: Sequence[int] | np.ndarray | None = None
  ) -> PassOutput:
    """Runs the next pass.

    Args:
      step: The pass that follows those run so far.
      forced: Bits of each layer; None leaves them to the policy.

    Returns:
      The distribution of the next token and what the layers did.
    """
    layers = self._model.config.num_layers
    if forced is None:
      forced = np.full((layers,), ADAPTIVE)
    self.memory, output = _run(
      self._model.decoder,
      jnp.asarray(step.padded()),
      self.memory,
      jnp.asarray([step.start], jnp.int32),
      jnp.asarray([len(step.tokens)], jnp.int32),
      jnp.asarray(forced, jnp.int32),
      policy=self._policy,
      phase=step.phase,
    )
    return output


@partial(jax.jit, static_argnames=("policy", "phase"), donate_argnames="memory")
def _run(
  decoder: Decoder,
  tokens: Int[Array, "T"],
  memory: Memory,
  start: Int[Array, "1"],
  length: Int[Array, "1"],
  forced: Int[Array, "L"],
  *,
  policy: PolicyConfig,
  phase: Phase,
) -> tuple[Memory, PassOutput]:
  if phase == "decode":
    state = policy_lib.start_step(policy, memory.policy, memory.entropy)
  else:
    state = policy_lib.start_prefill(policy, 1)
  hidden, cache, state, trace = decoder.run_layers(
    tokens[None],
    start=start,
    lengths=length,
    cache=memory.cache,
    policy=state,
    forced=forced,
    policy_config=policy,
    phase=phase,
  )
  logits = decoder.logits(last_hidden(hidden, length))
  entropy = signals.topk_entropy(logits, policy.entropy_top_k)
  memory = Memory(
    cache=cache,
    policy=state if phase == "decode" else memory.policy,
    entropy=entropy,
  )
  output = PassOutput(
    log_probabilities=jax.nn.log_softmax(logits[0]),
    entropy=entropy[0],
    levels=trace.bits[:, 0],
    activity=trace.activity[:, 0],
  )
  return memory, output


def last_hidden(
  hidden: Float[Array, "1 T D"], length: Int[Array, "1"]
) -> Float[Array, "1 D"]:
  """Hidden state of the last token that is no padding."""
  last = (length - 1)[:, None, None]
  return jnp.take_along_axis(hidden, last, axis=1)[:, 0]


def divergence(
  log_p: Float[Array, "V"], log_q: Float[Array, "V"]
) -> Float[Array, ""]:
  """KL divergence from p to q in nats; NaN where either holds one."""
  # Rounding takes the sum of two that are all but equal below zero.
  return jnp.maximum(jnp.sum(jnp.exp(log_p) * (log_p - log_q)), 0.0)
