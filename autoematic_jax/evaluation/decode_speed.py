"""Time of a decode step of models of real shapes, by precision."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax import policy as policy_lib
from autoematic_jax import programs
from autoematic_jax import signals
from autoematic_jax.evaluation import synthetic
from autoematic_jax.policy import PolicyConfig
from autoematic_jax.sampling import SamplingArrays
from autoematic_jax.sampling import SamplingConfig

PRECISIONS = ("bf16", "nvfp4", "autofp6", "adaptive")
"""`adaptive` is autofp6 at 6 bits in two of five layers, else at 4, by levels
that only the device knows; which they are, random weights cannot tell."""

_FORMATS: dict[str, synthetic.Format] = {
  "bf16": "bf16",
  "nvfp4": "nvfp4",
  "autofp6": "autofp6",
  "adaptive": "autofp6",
}
_POLICY = PolicyConfig(levels=(4, 6))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
  """What to time.

  Attributes:
    models: Names in `synthetic.MODELS`.
    precisions: Of `PRECISIONS`.
    batches: Requests that decode together.
    contexts: Tokens in the cache before.
    steps: Decode steps of a call.
    repeats: Calls of which the median is taken.
  """

  models: tuple[str, ...]
  precisions: tuple[str, ...] = PRECISIONS
  batches: tuple[int, ...] = (1,)
  contexts: tuple[int, ...] = (1024,)
  steps: int = 32
  repeats: int = 5


def measure_all(options: DecodeOptions) -> Iterator[dict[str, Any]]:
  """A row for each model, format, batch and context, once it is timed."""
  formats: dict[synthetic.Format, list[str]] = {}
  for one in options.precisions:
    formats.setdefault(_FORMATS[one], []).append(one)
  cases = len(options.batches) * len(options.contexts)
  total = len(options.models) * len(options.precisions) * cases
  with tqdm(total=total, unit="row") as progress:
    for name in options.models:
      for form, precisions in formats.items():
        progress.set_postfix_str(f"{name} {form}")
        model, timer, packed_for = None, None, 0
        for batch in options.batches:
          rows = 16 if batch <= 16 else 64
          if rows != packed_for:
            # The one before is let go first: two may not fit.
            model = timer = None
            model = synthetic.random_decoder(synthetic.MODELS[name], form, rows)
            packed_for = rows
          for context in options.contexts:
            timer = _Timer(model, batch, context, options)
            for precision in precisions:
              row = {"model": name, "precision": precision, "batch": batch}
              yield {**row, "context": context, **timer.measure(precision)}
              progress.update()


class _Timer:
  """Decode steps of one model, compiled once for all its precisions."""

  def __init__(self, model, batch, context, options):
    self.model, self.batch, self.context = model, batch, context
    self.options = options
    self.settings = programs.Settings(
      policy=_POLICY, greedy=True, steps=options.steps
    )
    self.run = jax.jit(
      programs.decode, static_argnames="settings", donate_argnames="state"
    )

  def measure(self, precision):
    request = programs.Request(
      forced=jnp.asarray(_levels(precision, self.model.config.num_layers)),
      stop_tokens=jnp.full((1,), -1, jnp.int32),
      sampling=SamplingArrays.of([SamplingConfig()] * self.batch),
    )
    times = []
    for _ in range(self.options.repeats + 1):
      state = jax.block_until_ready(self._state())
      begin = time.perf_counter()
      out = self.run(self.model, state, request, self.settings)
      jax.block_until_ready(out)
      times.append(time.perf_counter() - begin)
    step = statistics.median(times[1:]) / self.options.steps
    return {
      "step_us": step * 1e6,
      "tokens_per_s": self.batch / step,
      "first_call_s": times[0],
    }

  def _state(self):
    """As after a prefill of `context` tokens, whose cache is zeros."""
    config, batch = self.model.config, self.batch
    codec = kv_codecs.DenseCodec("bfloat16")
    if self.model.choices:
      codec = kv_codecs.AutoFPCodec()
    cache = kv_cache.init_cache(
      num_layers=config.num_layers,
      batch=batch,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
      capacity=self.context + self.options.steps,
      codec=codec,
    )
    return programs.DecodeState(
      token=jnp.arange(batch, dtype=jnp.int32),
      position=jnp.full((batch,), self.context, jnp.int32),
      entropy=jnp.zeros((batch,)),
      done=jnp.zeros((batch,), bool),
      cache=cache,
      policy=policy_lib.start_decode(_POLICY, batch),
    )


def _levels(precision, layers):
  if precision == "adaptive":
    at_six = np.arange(layers) % 5 % 2 == 1
    return np.where(at_six, 6, 4).astype(np.int32)
  bits = {"bf16": 16, "nvfp4": 4, "autofp6": 6}[precision]
  return np.full((layers,), bits, np.int32)


def signals_us(name: str, batch: int, repeats: int = 20) -> float:
  """Microseconds that a step's signals and policy take by themselves.

  Args:
    name: In `synthetic.MODELS`.
    batch: Requests that decode together.
    repeats: Of 64 steps each; the median counts.

  Returns:
    Of one step, more than they add to a model, where they share kernels.
  """
  config, steps = synthetic.MODELS[name], 64
  keys = jax.random.split(jax.random.key(0), 2)
  hidden = jax.random.normal(
    keys[0], (config.num_layers + 1, batch, 1, config.hidden_size)
  )
  logits = jax.random.normal(keys[1], (batch, config.vocab_size))

  def layer(hidden, mask, state, index):
    activity = signals.layer_update_activity(
      hidden[index],
      hidden[index + 1],
      mask,
      reduction=_POLICY.reduction,
      epsilon=_POLICY.epsilon,
    )
    return policy_lib.update_decode(_POLICY, state, activity, index), None

  @jax.jit
  def run(hidden, logits):
    mask = jnp.ones((batch, 1), bool)

    def step(state, shift):
      entropy = signals.topk_entropy(logits + shift, _POLICY.entropy_top_k)
      state = policy_lib.start_step(_POLICY, state, entropy)
      return lax.scan(
        lambda state, index: layer(hidden, mask, state, index),
        state,
        jnp.arange(config.num_layers),
      )[0], None

    start = policy_lib.start_decode(_POLICY, batch)
    return lax.scan(step, start, jnp.arange(steps, dtype=jnp.float32))[0]

  jax.block_until_ready(run(hidden, logits))
  times = []
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(run(hidden, logits))
    times.append(time.perf_counter() - begin)
  return statistics.median(times) / steps * 1e6


HEADER = (
  f"{'model':>13} {'precision':>10} {'batch':>6} {'context':>8}"
  f" {'step us':>9} {'tokens/s':>10}"
)
"""Names of the columns of `line`."""


def line(row: dict[str, Any]) -> str:
  """A row as text."""
  return (
    f"{row['model']:>13} {row['precision']:>10} {row['batch']:>6}"
    f" {row['context']:>8} {row['step_us']:>9.0f} {row['tokens_per_s']:>10.1f}"
  )
