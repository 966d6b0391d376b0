r"""Trains the reference model, for so many minutes at a time.

    python -m autoematic_jax.models.reference.train --text FOLDER \
      --checkpoint state.npz --minutes 8.5

The same command continues what the checkpoint holds, until all steps are
done.
"""

import argparse
import functools
import time
from collections.abc import Callable, Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float

from autoematic_jax.models.reference import data
from autoematic_jax.models.reference import network
from autoematic_jax.models.reference import text as text_lib
from autoematic_jax.models.reference import training_state
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.models.reference.training_state import State

_HELD_OUT_WINDOWS = 64
_REPORT_EVERY_S = 10.0
_SAVE_EVERY_S = 120.0

Update = Callable[[State, Array, Array], tuple[State, Float[Array, "S"]]]


def main() -> None:
  """Trains until the time or the steps are used up, then saves."""
  began = time.monotonic()
  args = _arguments()
  config = network.SIZES[args.size]
  attention = args.attention or _best_attention()
  tokenizer = vocabulary.load(args.tokenizer)
  text, held_out_text = (
    np.array(vocabulary.encode_articles(tokenizer, articles), np.uint16)
    for articles in text_lib.articles(args.text)
  )
  mixture = _mixture(args, len(text))
  chunks = -(-args.steps // mixture.steps)
  optimizer = make_optimizer(args.learning_rate, chunks * mixture.steps)
  state, first = training_state.initial(config, optimizer, args.seed), 0
  if args.checkpoint.exists():
    state, first = training_state.load(args.checkpoint, state)
  print(
    f"{network.count_parameters(state.params) / 1e6:.2f} M parameters,"
    f" {jax.devices()[0].device_kind}, attention by {attention};"
    f" {mixture.text_share:.1%} of the windows hold text ({len(text)} tokens)",
    flush=True,
  )
  stream = data.load_chunks(
    mixture,
    tokenizer.to_str(),
    text,
    first=first,
    last=chunks,
    workers=args.workers,
  )
  score = _held_out_score(held_out_text, config, attention, mixture.window)

  def save(state, done):
    training_state.save(args.checkpoint, state, done)
    print(
      f"saved after chunk {done} of {chunks}; held-out text:"
      f" {score(state.params):.4f} nats a token",
      flush=True,
    )

  state, done = train(
    state,
    stream,
    make_update(config, optimizer, attention),
    save,
    _Progress(mixture, first, chunks),
    until=began + args.minutes * 60,
  )
  save(state, done)
  print("finished" if done == chunks else "run again to continue", flush=True)


def train(
  state: State,
  stream: Generator[data.Chunk, None, None],
  update: Update,
  save: Callable[[State, int], None],
  progress: "_Progress",
  *,
  until: float,
) -> tuple[State, int]:
  """Trains on chunk after chunk, and saves now and then.

  Args:
    state: To begin with; its arrays are used up.
    stream: The chunks that are left; closed in the end.
    update: Takes the steps of a chunk.
    save: Keeps a state and the number of its chunks.
    progress: Knows which chunk comes first.
    until: Time of `time.monotonic()` at which to stop.

  Returns:
    The last state and the number of chunks that it has seen, all told.
  """
  saved, losses = time.monotonic(), None
  for chunk in stream:
    # The device works on this chunk while the next line waits for the last.
    state, new_losses = update(state, *map(jnp.asarray, chunk))
    if losses is not None:
      progress.add(np.asarray(losses))
    losses = new_losses
    if time.monotonic() > until:
      break
    if time.monotonic() - saved > _SAVE_EVERY_S:
      progress.add(np.asarray(losses))
      losses = None
      save(state, progress.done)
      saved = time.monotonic()
  stream.close()
  if losses is not None:
    progress.add(np.asarray(losses))
  progress.report()
  return state, progress.done


def make_optimizer(
  learning_rate: float, steps: int
) -> optax.GradientTransformation:
  """AdamW: a warm-up, a plateau, and a fall to zero over the last third.

  As the plateau does not depend on the end, `steps` may be changed until the
  fall has begun.
  """
  warmup = min(200, steps // 10 + 1)
  fall = steps // 3 + 1
  schedule = optax.join_schedules(
    [
      optax.linear_schedule(0.0, learning_rate, warmup),
      optax.constant_schedule(learning_rate),
      optax.linear_schedule(learning_rate, 0.0, fall),
    ],
    [warmup, max(warmup, steps - fall)],
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=_decayed),
  )


def make_update(
  config: network.NetworkConfig,
  optimizer: optax.GradientTransformation,
  attention: network.Attention,
) -> Update:
  """A jitted function that takes all steps of a chunk, reusing the state."""

  def mean_loss(params, tokens, counted):
    total, count = network.loss_sum(
      params, tokens, counted, config=config, attention=attention
    )
    return total / jnp.maximum(count, 1)

  def step(state, batch):
    tokens, counted = batch
    loss, grads = jax.value_and_grad(mean_loss)(
      state.params, tokens.astype(jnp.int32), counted
    )
    changes, kept = optimizer.update(grads, state.optimizer, state.params)
    params = jax.tree.map(jnp.add, state.params, changes)
    return State(params, kept), loss

  @functools.partial(jax.jit, donate_argnums=0)
  def update(state, tokens, counted):
    return lax.scan(step, state, (tokens, counted))

  return update


def _decayed(params):
  """Which weights decay: all but the scales of norms."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: not path[-1].key.endswith("norm"), params
  )


def _held_out_score(text, config, attention, window):
  """A function from weights to the mean loss on held-out text."""
  count = min(_HELD_OUT_WINDOWS, (len(text) - 1) // window)
  starts = np.linspace(0, len(text) - window - 1, count).astype(int)
  tokens = jnp.asarray(
    np.stack([text[i : i + window + 1] for i in starts]), jnp.int32
  )
  counted = jnp.ones((count, window), bool)

  def score(params):
    total, number = network.loss_sum(
      params, tokens, counted, config=config, attention=attention
    )
    return float(total / number)

  return score


class _Progress:
  """Counts chunks, and prints loss and speed now and then.

  Attributes:
    done: Chunks that are trained on.
  """

  def __init__(self, mixture: data.Mixture, first: int, chunks: int):
    self.done = first
    self._steps = mixture.steps
    self._tokens = mixture.steps * mixture.batch * mixture.window
    self._chunks = chunks
    self._losses: list[float] = []
    self._reported_chunk = first
    self._reported = time.monotonic()

  def add(self, losses: np.ndarray) -> None:
    """Takes the losses of one more chunk."""
    self._losses += losses.tolist()
    self.done += 1
    if time.monotonic() - self._reported > _REPORT_EVERY_S:
      self.report()

  def report(self) -> None:
    """Prints what came since the last report, if anything."""
    now, count = time.monotonic(), self.done - self._reported_chunk
    if not count:
      return
    seconds = now - self._reported
    left = (self._chunks - self.done) * seconds / count / 60
    print(
      f"step {self.done * self._steps} of {self._chunks * self._steps}:"
      f" loss {np.mean(self._losses):.4f},"
      f" {count * self._tokens / seconds / 1e3:.1f} k tokens/s,"
      f" {left:.1f} min left",
      flush=True,
    )
    self._losses = []
    self._reported_chunk, self._reported = self.done, now


def _mixture(args, text_tokens: int) -> data.Mixture:
  return data.Mixture(
    seed=args.seed,
    steps=args.steps_per_dispatch,
    batch=args.batch,
    window=args.window,
    text_share=data.limited_text_share(
      args.text_share,
      text_tokens=text_tokens,
      all_tokens=args.steps * args.batch * args.window,
      epochs=args.text_epochs,
    ),
  )


def _best_attention() -> network.Attention:
  return "cudnn" if jax.default_backend() == "gpu" else "xla"


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="Train the reference model.")
  add = parser.add_argument
  add("--text", type=Path, required=True, help="folder of .txt files")
  add("--checkpoint", type=Path, required=True, help="an .npz to continue")
  add("--tokenizer", type=Path, default=vocabulary.MODEL_FOLDER)
  add("--minutes", type=float, default=8.5, help="stop and save after these")
  add("--steps", type=int, default=16000, help="of the whole training")
  add("--steps-per-dispatch", type=int, default=8)
  add("--batch", type=int, default=128, help="windows of a step")
  add("--window", type=int, default=512, help="tokens of a window")
  add("--learning-rate", type=float, default=1.5e-3)
  add("--text-share", type=float, default=0.3, help="windows of text, at most")
  add("--text-epochs", type=float, default=20.0, help="lowers --text-share")
  add("--workers", type=int, default=12, help="processes that make data")
  add("--attention", choices=("cudnn", "xla"), help="default: by the device")
  add("--size", choices=sorted(network.SIZES), default="reference")
  add("--seed", type=int, default=0)
  return parser.parse_args()


if __name__ == "__main__":
  main()
