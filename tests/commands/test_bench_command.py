"""`autoematic bench generate`: that it measures what it says it does."""

import json

import pytest

from autoematic_jax.errors import AutoematicError


def test_report_has_a_row_for_each_precision(run, checkpoints, tmp_path):
  report = tmp_path / "speed.json"
  code, out, _ = run(
    "bench",
    "generate",
    checkpoints["autofp6"],
    "--precisions",
    "fp32,adaptive",
    "--prompt-tokens",
    "20",
    "--new-tokens",
    "4",
    "--repeats",
    "1",
    "--compilation-cache",
    "",
    "--json",
    report,
  )
  assert code == 0
  assert "x fp32" in out
  found = json.loads(report.read_text())
  assert {"command", "machine", "versions", "rows"} <= found.keys()
  dense, adaptive = found["rows"]
  assert (dense["precision"], dense["execution_bits"]) == ("fp32", 32)
  assert 2 <= adaptive["execution_bits"] <= 6
  for row in found["rows"]:
    assert (row["prompt_tokens"], row["new_tokens"]) == (20, 4)
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
      assert row[name] > 0
    assert row["compile_s"] > 0
    assert row["peak_rss_mb"] > 50


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--repeats", "0"], "--repeats 0"),
    (["--new-tokens", "1"], "--new-tokens must be >= 2"),
    (["--precisions", "fast"], "expected adaptive"),
  ],
)
def test_bad_input_is_named(run, checkpoints, words, message):
  with pytest.raises(AutoematicError, match=message):
    run("bench", "generate", checkpoints["autofp6"], *words)
