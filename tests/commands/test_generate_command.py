"""`autoematic generate` as it is typed."""

import json

import numpy as np
import pytest
from matplotlib import image

import autoematic_jax
from autoematic_jax.errors import AutoematicError

COMMON = ["--compilation-cache", "", "--max-new-tokens", "9", "--ignore-eos"]


def test_json_holds_what_the_api_returns(run, checkpoints):
  code, out, _ = run(
    "generate", checkpoints["autofp6"], "--prompt", "Paris", "--json", *COMMON
  )
  assert code == 0
  found = json.loads(out)
  model = autoematic_jax.load(checkpoints["autofp6"])
  result = autoematic_jax.generate(
    model, "Paris", chat=True, max_new_tokens=9, ignore_eos=True
  )
  assert found["text"] == result.text
  assert found["tokens"] == result.token_ids[0]
  np.testing.assert_array_equal(found["trace"], result.trace)
  assert found["stored_bits"] == round(model.stored_bits, 4)
  executed = np.concatenate([np.ravel(found["trace"])])
  assert found["execution_bits"]["decode"] == pytest.approx(executed.mean())
  assert sum(found["levels"]["decode"].values()) == pytest.approx(1)


def test_text_streams_before_the_summary(run, checkpoints):
  path = checkpoints["autofp6"]
  code, out, _ = run(
    "generate", path, "--raw", "--prompt", "The capital", *COMMON
  )
  text = autoematic_jax.generate(
    autoematic_jax.load(path), "The capital", max_new_tokens=9, ignore_eos=True
  ).text
  assert code == 0
  assert out.startswith(text)
  summary = out[len(text) :]
  for part in ("tokens/s", "first token", "stored bits", "execution bits"):
    assert part in summary


def test_trace_plot_is_a_picture(run, checkpoints, tmp_path):
  picture = tmp_path / "trace.png"
  run(
    "generate",
    checkpoints["autofp6"],
    "--prompt",
    "Paris",
    "--trace-plot",
    picture,
    *COMMON,
  )
  pixels = image.imread(picture)
  assert pixels.shape[0] > 200
  # Levels differ in colour: more than axes on white.
  assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 10


def test_several_prompts_are_told_apart(run, checkpoints):
  code, out, _ = run(
    "generate",
    checkpoints["autofp6"],
    "--prompt",
    "one",
    "--prompt",
    "two",
    "--precision",
    "4",
    *COMMON,
  )
  assert code == 0
  assert "[0] " in out
  assert "[1] " in out
  assert "4.00 execution bits (100% at 4)" in out


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ([], "give --prompt"),
    (["--prompt", "  "], "a prompt is empty"),
    (["--prompt", "x " * 300], "the model's context is 96"),
    (["--prompt", "x", "--precision", "5"], "offered: adaptive, 2, 4, 6"),
    (["--prompt", "x", "--precision", "4,6"], "a level for each layer"),
    (["--prompt", "x", "--precision", "low"], "expected adaptive"),
    (["--prompt", "x", "--max-new-tokens", "0"], "must be >= 1"),
    (["--prompt", "x", "--raw", "--system", "y"], "drop --raw"),
    (["--prompt-file", "/nowhere"], "--prompt-file /nowhere"),
    (["--prompt", "x", "--policy", "/nowhere"], "--policy /nowhere"),
    (["--prompt", "x", "--temperature", "-1"], "temperature"),
  ],
)
def test_bad_input_is_named(run, checkpoints, words, message):
  with pytest.raises(AutoematicError, match=message):
    run("generate", checkpoints["autofp6"], "--compilation-cache", "", *words)


def test_a_folder_that_is_no_checkpoint_is_named(run, tmp_path):
  with pytest.raises(AutoematicError, match=str(tmp_path)):
    run("generate", tmp_path, "--prompt", "x", "--compilation-cache", "")
