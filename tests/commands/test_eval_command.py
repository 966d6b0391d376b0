"""`autoematic eval` against sums made by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoematic_jax
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.models.transformer import ADAPTIVE
from autoematic_jax.precisions import forced_levels

TEXT = "The capital of France is Paris, and 1234567 people don't live there. "
OPTIONS = ["--context", "24", "--windows", "3", "--compilation-cache", ""]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_text(TEXT * 8)
  return path


@pytest.fixture(scope="module")
def models(checkpoints):
  return {name: autoematic_jax.load(path) for name, path in checkpoints.items()}


def log_probabilities(model, tokens, precision):
  """`[windows, T - 1, V]` by generation's own forward pass."""
  rows = []
  for window in tokens:
    hidden, _ = teacher_forcing.hidden_states(
      model, jnp.asarray(window), forced_levels(model, precision), "prefill"
    )
    rows.append(jax.nn.log_softmax(model.decoder.logits(hidden[:-1])))
  return np.asarray(rows, np.float64)


def test_scores_are_those_of_the_definitions(
  run, checkpoints, models, text, tmp_path
):
  report = tmp_path / "report.json"
  code, out, _ = run(
    "eval",
    checkpoints["autofp6"],
    "--baseline",
    checkpoints["fp32"],
    "--text",
    text,
    "--precisions",
    "fp32,4",
    "--json",
    report,
    *OPTIONS,
  )
  assert code == 0
  assert "mean KL" in out
  dense, four = json.loads(report.read_text())["rows"]
  ids = models["fp32"].tokenizer.encode(TEXT * 8)[: 3 * 24]
  tokens = np.asarray(ids, np.int32).reshape(3, 24)
  log_p = log_probabilities(models["fp32"], tokens, None)
  log_q = log_probabilities(models["autofp6"], tokens, 4)
  for row, log in ((dense, log_p), (four, log_q)):
    nll = -np.take_along_axis(log, tokens[:, 1:, None], 2)
    assert row["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-4)
  kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
  assert four["kl_mean"] == pytest.approx(kl.mean(), rel=1e-3)
  assert four["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
  low, high = four["kl_mean_interval"]
  assert low <= four["kl_mean"] <= high
  agree = (log_p.argmax(-1) == log_q.argmax(-1)).mean()
  assert four["top1_agreement"] == pytest.approx(agree)
  assert dense["kl_mean"] == pytest.approx(0, abs=1e-9)
  assert (four["execution_bits"], four["tokens"]) == (4.0, 69)


def test_decoding_token_by_token_sees_what_one_pass_sees(models):
  """At 4 bits in both phases only the dots' order of summation differs."""
  model = models["autofp6"]
  tokens = jnp.asarray(model.tokenizer.encode(TEXT)[:30], jnp.int32)
  forced = forced_levels(model, 4)
  once, _ = teacher_forcing.hidden_states(model, tokens, forced, "prefill")
  steps, bits = teacher_forcing.hidden_states(model, tokens, forced, "decode")
  assert bits.shape == (30 - teacher_forcing.DECODE_PREFIX, 3)
  np.testing.assert_allclose(once, steps, rtol=0.05, atol=0.05)


def test_the_policy_runs_in_both_modes(models):
  model = models["autofp6"]
  tokens = jnp.asarray(model.tokenizer.encode(TEXT)[:30], jnp.int32)
  forced = jnp.full((3,), ADAPTIVE)

  def first_layers(**options):
    policy = dataclasses.replace(model.policy, **options)
    _, bits = teacher_forcing.hidden_states(
      model.with_policy(policy), tokens, forced, "decode"
    )
    return set(np.asarray(bits)[:, 0].tolist())

  # Of random weights every step is uncertain.
  assert first_layers(high_entropy_level=2) == {4}
  assert first_layers(high_entropy_level=6) == {6}


def test_an_interrupted_run_goes_on(run, checkpoints, text, tmp_path):
  journal = tmp_path / "journal"
  words = ["eval", checkpoints["autofp6"], "--text", text, *OPTIONS]
  words += ["--precisions", "4,6", "--resume", journal]
  _, first, _ = run(*words)
  lines = journal.read_text().splitlines()
  assert len(lines) == 1 + 6
  # Two windows remain, and the line that was being written is cut off.
  journal.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
  _, second, _ = run(*words)
  assert second == first
  with pytest.raises(AutoematicError, match="another measurement"):
    run(*words, "--mode", "decode")


def test_activations_are_refined_as_asked(run, checkpoints, text, tmp_path):
  report = tmp_path / "report.json"
  words = ["eval", checkpoints["autofp6"], "--baseline", checkpoints["fp32"]]
  words += ["--text", text, "--precisions", "6", "--json", report, *OPTIONS]
  kl = []
  for more in (
    [],
    ["--disjoint-masks"],
    ["--activation-threshold", "0.1"],
    ["--nearest-base"],
  ):
    run(*words, *more)
    kl.append(json.loads(report.read_text())["rows"][0]["kl_mean"])
  assert len(set(kl)) == 4


def test_windows_are_left_out(run, checkpoints, text, tmp_path):
  report = tmp_path / "report.json"
  words = ["eval", checkpoints["autofp6"], "--baseline", checkpoints["fp32"]]
  words += ["--text", text, "--precisions", "6", "--json", report]
  words += ["--context", "24"]
  kl = []
  for window in (
    ["--windows", "2"],
    ["--windows", "1"],
    ["--skip-windows", "1", "--windows", "1"],
  ):
    run(*words, *window)
    kl.append(json.loads(report.read_text())["rows"][0]["kl_mean"])
  assert kl[0] == pytest.approx((kl[1] + kl[2]) / 2)


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--activation-threshold", "2"], "threshold=2.0 must be in"),
    (["--context", "500"], "--context 500 must be"),
    (["--context", "90", "--text", "short"], "the text has"),
    (["--windows", "0"], "--windows 0"),
    (["--skip-windows", "-1"], "--skip-windows -1 must be"),
    (["--skip-windows", "999"], "after 999 of them needs"),
    (["--precisions", "bf16"], "the reference is fp32"),
    (["--precisions", "5"], "offered"),
    (["--text", "/nowhere"], "--text /nowhere"),
  ],
)
def test_bad_input_is_named(run, checkpoints, text, tmp_path, words, message):
  short = tmp_path / "short.txt"
  short.write_text("Paris")
  words = [short if word == "short" else word for word in words]
  with pytest.raises(AutoematicError, match=message):
    run(
      "eval",
      checkpoints["autofp6"],
      "--text",
      text,
      *OPTIONS[:-2],
      *words,
      "--compilation-cache",
      "",
    )
