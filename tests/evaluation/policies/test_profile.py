"""`autoematic profile` from end to end."""

import json
import shutil

import pytest

import autoematic_jax
from autoematic_jax.checkpoints import store_policy
from autoematic_jax.cli import profile
from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.policy import PolicyConfig


@pytest.fixture
def copy(checkpoints, tmp_path):
  return shutil.copytree(checkpoints["autofp6"], tmp_path / "copy")


@pytest.fixture
def words(copy, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("The capital of France is Paris, and people live there. " * 9)
  words = ["profile", copy, "--text", text, "--context", 32, "--windows", 2]
  return [*words, "--resume", tmp_path / "journal"]


def metadata(copy):
  return json.loads((copy / "autoematic.json").read_text())


def test_floors_are_measured_stored_and_kept_to(run, words, copy):
  before = metadata(copy)
  code, out = run(*words, "--max-kl", 0, "--dry-run")
  assert code == 0
  assert metadata(copy) == before
  code, out = run(*words, "--max-kl", 0)
  assert code == 0
  assert f"stored in {copy}" in out
  after = metadata(copy)
  assert after["policy"]["levels"] == [4, 6]
  assert after["policy"]["layer_floors"] == []
  assert len(after["sensitivity"]["kl"]) == 3
  assert {**before, "policy": 0} == {
    name: value
    for name, value in {**after, "policy": 0}.items()
    if name != "sensitivity"
  }
  # A bound that some layers keep, and others do not.
  costs = sorted(after["sensitivity"]["kl"][0])
  code, out = run(*words, "--max-kl", sum(costs[2:4]) / 2)
  policy = metadata(copy)["policy"]
  assert sorted(policy["layer_floors"]) == [2, 2, 2, 4, 4, 4]
  assert policy["levels"] == [2, 4, 6]
  model = autoematic_jax.load(copy)
  result = autoematic_jax.generate(model, "def f(x):", max_new_tokens=8)
  for layer, floor in enumerate(policy["layer_floors"]):
    assert (result.trace[:, layer] >= floor).all()


@pytest.mark.parametrize(
  ("more", "message"),
  [
    (["--windows", 0], "--windows 0 must be >= 1"),
    (["--max-kl", -1], "--max-kl -1.0 must be >= 0"),
    (["--context", 4000], "--context 4000 must be from"),
    (["--text", "missing.txt"], "--text missing.txt"),
  ],
)
def test_bad_input_is_named(run, words, more, message):
  with pytest.raises(AutoematicError, match=message):
    run(*words, *more)


def test_a_checkpoint_without_a_choice_is_refused(run, words, checkpoints):
  words[1] = checkpoints["fp32"]
  with pytest.raises(AutoematicError, match="offers 0 levels"):
    run(*words)
  with pytest.raises(CheckpointError, match="does not exist"):
    store_policy("nowhere", {}, {})


def test_floors_of_another_model_are_refused(judged):
  policy = PolicyConfig(layer_floors=(4, 4))
  with pytest.raises(PrecisionError, match="for 2 layers; this model has 6"):
    judged.with_policy(policy)


def test_floors_that_say_nothing_are_left_out():
  policy = PolicyConfig(levels=(4, 6), tau=0.3)
  for floors, levels, kept in (
    ([2, 2], (2, 4, 6), ()),
    ([4, 4], (4, 6), ()),
    ([2, 4], (2, 4, 6), (2, 4)),
    ([6, 6], (6,), ()),
  ):
    found = profile.with_floors(policy, (2, 4, 6), floors)
    assert (found.levels, found.layer_floors) == (levels, kept)
    assert found.tau == 0.3
