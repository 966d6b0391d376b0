"""Exact match on the held-out problems, and the loss on held-out text.

    python -m autoematic_jax.models.reference.evaluate

An answer matches if every character of it, steps included, is as it should
be; beside it stands how often the final answer alone is right.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.typing import DTypeLike

from autoematic_jax.models.reference import decode
from autoematic_jax.models.reference import network
from autoematic_jax.models.reference import problem_file
from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.models.reference import weights
from autoematic_jax.models.reference.network import NetworkConfig
from autoematic_jax.models.reference.network import Params
from autoematic_jax.models.reference.problem import Problem
from autoematic_jax.models.reference.problem import final_answer

_WINDOW = 512


class Score(NamedTuple):
  """How many of the problems of a kind were answered right.

  Attributes:
    problems: How many there are.
    exact: Answers right to the last character.
    final: Final answers right.
  """

  problems: int
  exact: int
  final: int


def answer(
  params: Params,
  config: NetworkConfig,
  tokenizer: tokenizers.Tokenizer,
  problems: Sequence[Problem],
  *,
  batch: int,
  dtype: DTypeLike = jnp.bfloat16,
) -> list[str]:
  """Greedy answers, a few tokens longer than any right one at most."""
  prompts = vocabulary.encode_prompts(tokenizer, [p.prompt for p in problems])
  right = vocabulary.encode_answers(tokenizer, problems)
  end = vocabulary.token_id(tokenizer, vocabulary.END)
  width = max(map(len, prompts))
  new_tokens = max(map(len, right)) + 8
  padded = np.zeros((len(prompts), width), np.int32)
  for row, ids in zip(padded, prompts, strict=True):
    row[: len(ids)] = ids
  lengths = np.array([len(ids) for ids in prompts], np.int32)
  texts = []
  for start in range(0, len(prompts), batch):
    # The last batch is filled up, so that one program serves all.
    rows = np.arange(start, start + batch) % len(prompts)
    ids = decode.greedy(
      params,
      jnp.asarray(padded[rows]),
      jnp.asarray(lengths[rows]),
      config=config,
      new_tokens=new_tokens,
      end=end,
      dtype=dtype,
    )
    texts += tokenizer.decode_batch(np.asarray(ids).tolist())
  return texts[: len(prompts)]


def score(
  problems: Sequence[Problem], answers: Sequence[str]
) -> dict[str, Score]:
  """Scores by kind, and of all problems under `all`."""
  scores = {name: Score(0, 0, 0) for name in (*tasks.KINDS, "all")}
  for problem, text in zip(problems, answers, strict=True):
    hit = (1, text == problem.answer, final_answer(text) == problem.final)
    for name in (problem.kind, "all"):
      scores[name] = Score(*map(sum, zip(scores[name], hit, strict=True)))
  return {name: s for name, s in scores.items() if s.problems}


def text_loss(
  params: Params,
  config: NetworkConfig,
  tokenizer: tokenizers.Tokenizer,
  text: str,
  *,
  dtype: DTypeLike = jnp.bfloat16,
) -> float:
  """Mean loss in nats a token, in windows that start afresh.

  Raises:
    ValueError: The text does not fill one window.
  """
  ids = vocabulary.encode_articles(tokenizer, [text])
  count = (len(ids) - 1) // _WINDOW
  if not count:
    raise ValueError(f"{len(ids)} tokens do not fill a window of {_WINDOW}")
  windows = [
    np.array(ids[i * _WINDOW : (i + 1) * _WINDOW + 1], np.int32)
    for i in range(count)
  ]

  def loss(window):
    total, number = network.loss_sum(
      params,
      jnp.asarray(window[None]),
      jnp.ones((1, _WINDOW), bool),
      config=config,
      attention="xla",
      dtype=dtype,
    )
    return float(total / number)

  # Windows are of one length: their mean is that of all tokens.
  return float(np.mean([loss(window) for window in windows]))


def main() -> None:
  """Prints the scores of an exported model."""
  parser = argparse.ArgumentParser(description="Score an exported model.")
  add = parser.add_argument
  add("--model", type=Path, default=vocabulary.MODEL_FOLDER)
  add("--count", type=int, help="default: the problems in held_out.jsonl")
  add("--batch", type=int, default=400)
  add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
  add("--show", type=int, default=0, help="print so many wrong answers")
  args = parser.parse_args()
  dtype = jnp.dtype(args.dtype)
  host_params, config = weights.load(args.model)
  params = jax.device_put(host_params)
  tokenizer = vocabulary.load(args.model)
  if args.count:
    problems = tasks.held_out(args.count)
  else:
    problems = problem_file.load(args.model / problem_file.NAME)
  answers = answer(
    params, config, tokenizer, problems, batch=args.batch, dtype=dtype
  )
  for name, s in score(problems, answers).items():
    print(
      f"{name}: exact {s.exact / s.problems:.1%}, final"
      f" {s.final / s.problems:.1%} of {s.problems}"
    )
  wrong = [
    x for x in zip(problems, answers, strict=True) if x[0].answer != x[1]
  ]
  for problem, text in wrong[: args.show]:
    print(f"\n{problem.prompt}\nright: {problem.answer}\nwrong: {text}")
  sample = (args.model / "sample.txt").read_text(encoding="utf-8")
  loss = text_loss(params, config, tokenizer, sample, dtype=dtype)
  print(f"held-out text: {loss:.4f} nats a token")


if __name__ == "__main__":
  main()
