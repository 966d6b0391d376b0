import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoematic_jax.models.reference import evaluate
from autoematic_jax.models.reference import export
from autoematic_jax.models.reference import network
from autoematic_jax.models.reference import problem_file
from autoematic_jax.models.reference import tasks
from autoematic_jax.models.reference import train
from autoematic_jax.models.reference import training_state
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.models.reference import weights
from autoematic_jax.models.reference.problem import Problem

CONFIG = network.SIZES["toy"]


@pytest.fixture(scope="module")
def optimizer():
  return train.make_optimizer(3e-3, 60)


@pytest.fixture(scope="module")
def update(optimizer):
  """Compiled once for all tests, which train on chunks of one shape."""
  return train.make_update(CONFIG, optimizer, "xla")


def state_of(config):
  """A state of zeros, which costs no compilation."""
  optimizer = train.make_optimizer(1e-3, 10)
  shapes = jax.eval_shape(lambda: training_state.initial(config, optimizer, 0))
  return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)


def run(program, monkeypatch, *arguments):
  monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
  program.main()


@pytest.fixture
def run_training(monkeypatch, articles, optimizer, update):
  """Trains a toy for two chunks of two steps, or as long as it may."""
  monkeypatch.setattr(train, "make_optimizer", lambda *_: optimizer)
  monkeypatch.setattr(train, "make_update", lambda *_: update)

  def run_it(checkpoint, minutes=10):
    size = ["--size", "toy", "--steps", 4, "--steps-per-dispatch", 2]
    data = ["--batch", 2, "--window", 48, "--workers", 0]
    paths = ["--text", articles, "--checkpoint", checkpoint]
    run(train, monkeypatch, *size, *data, *paths, "--minutes", minutes)

  return run_it


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(
  run_training, tmp_path, capsys
):
  whole, parts = tmp_path / "whole.npz", tmp_path / "parts" / "state.npz"
  run_training(whole)
  assert "finished" in capsys.readouterr().out
  for left in ("run again", "finished"):
    run_training(parts, minutes=0)
    assert left in capsys.readouterr().out
  with np.load(whole) as one, np.load(parts) as two:
    assert set(one.files) == set(two.files)
    for name in one.files:
      np.testing.assert_array_equal(one[name], two[name], err_msg=name)
  assert [file.name for file in parts.parent.iterdir()] == ["state.npz"]


@pytest.mark.slow
def test_training_learns_a_chunk_by_heart(optimizer, update):
  state = training_state.initial(CONFIG, optimizer, 0)
  rng = np.random.default_rng(0)
  window = rng.integers(0, 4096, (2, 49)).astype(np.uint16)
  tokens = np.stack([window, window])
  losses = []
  for _ in range(25):
    state, new = update(state, jnp.asarray(tokens), jnp.ones((2, 2, 48), bool))
    losses += new.tolist()
  assert losses[0] == pytest.approx(np.log(4096), rel=0.05)
  assert losses[-1] < 0.5 * losses[0]


def test_norms_do_not_decay():
  optimizer = train.make_optimizer(0.1, 10)
  params = {"norm": jnp.ones(2), "layers": {"q_norm": jnp.ones(2)}}
  params["layers"]["qkv"] = jnp.ones(2)
  zeros = jax.tree.map(jnp.zeros_like, params)

  @jax.jit
  def update(kept):
    return optimizer.update(zeros, kept, params)

  _, kept = update(optimizer.init(params))
  changes, _ = update(kept)
  assert (changes["norm"] == 0).all()
  assert (changes["layers"]["q_norm"] == 0).all()
  assert (changes["layers"]["qkv"] < 0).all()


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
  state = state_of(CONFIG)
  path = tmp_path / "state.npz"
  training_state.save(path, state, 1)
  other = network.NetworkConfig(num_layers=1, hidden_size=32)
  with pytest.raises(ValueError, match="another network"):
    training_state.load(path, state_of(other))
  with pytest.raises(ValueError, match="other sizes"):
    training_state.load_params(path, network.NetworkConfig(hidden_size=32))


@pytest.mark.slow
def test_what_is_exported_can_be_evaluated(
  tmp_path, monkeypatch, articles, capsys, optimizer
):
  state = training_state.initial(CONFIG, optimizer, 0)
  checkpoint, out = tmp_path / "state.npz", tmp_path / "out"
  training_state.save(checkpoint, state, 1)
  monkeypatch.setattr(evaluate, "_WINDOW", 64)
  paths = ["--checkpoint", checkpoint, "--text", articles, "--out", out]
  run(export, monkeypatch, *paths, "--size", "toy")
  loaded, config = weights.load(out)
  assert config == CONFIG
  np.testing.assert_array_equal(
    loaded["embedding"],
    state.params["embedding"].astype(jnp.bfloat16),
  )
  problems = problem_file.load(out / problem_file.NAME)
  assert problems == tasks.held_out()
  assert len(problems) == 400
  run(evaluate, monkeypatch, "--model", out, "--count", 9, "--batch", 4)
  told = capsys.readouterr().out
  assert "all: exact 0.0%, final 0.0% of 9" in told
  assert "nats a token" in told


def test_too_large_a_model_is_not_shipped(tmp_path, monkeypatch, articles):
  checkpoint = tmp_path / "state.npz"
  state = state_of(CONFIG)
  training_state.save(checkpoint, state, 1)
  monkeypatch.setattr(export, "LARGEST", 1000)
  paths = ["--checkpoint", checkpoint, "--text", articles]
  with pytest.raises(SystemExit, match="more than"):
    run(export, monkeypatch, *paths, "--out", tmp_path / "o", "--size", "toy")


def test_scores_tell_right_steps_from_right_results():
  problems = [
    Problem(kind="copy", prompt="a", answer=f"step. Answer: {n}")
    for n in range(3)
  ]
  answers = ["step. Answer: 0", "Answer: 1", "step. Answer: 1"]
  scores = evaluate.score(problems, answers)
  assert scores == {"copy": (3, 1, 2), "all": (3, 1, 2)}


def test_answers_come_in_the_order_of_the_problems(tokenizer, monkeypatch):
  problems = tasks.held_out(7)
  right = vocabulary.encode_answers(tokenizer, problems)
  prompts = vocabulary.encode_prompts(tokenizer, [p.prompt for p in problems])

  def know_all(params, padded, lengths, *, new_tokens, end, **_):
    found = np.full((len(padded), new_tokens), end)
    for row, ids, length in zip(found, padded, lengths, strict=True):
      answer = right[prompts.index(ids[:length].tolist())]
      row[: len(answer)] = answer
    return found

  monkeypatch.setattr(evaluate.decode, "greedy", know_all)
  answers = evaluate.answer({}, CONFIG, tokenizer, problems, batch=3)
  assert answers == [p.answer for p in problems]
