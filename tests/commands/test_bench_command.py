"""`autoematic bench`: that it measures what it says it does."""

import json

import jax.numpy as jnp
import pytest

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import kernel_forms
from autoematic_jax.evaluation import kernels


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


def test_kernels_report_each_form_beside_bf16(run, tmp_path, monkeypatch):
  monkeypatch.setitem(kernels.SHAPES, "small", ((96, 64),))
  report = tmp_path / "kernels.json"
  code, out, _ = run(
    *("bench", "kernels", "--rows", "3", "--repeats", "1", "--json", report)
  )
  assert code == 0
  assert "products by xla" in out
  found = json.loads(report.read_text())
  assert {"command", "machine", "versions"} <= found.keys()
  assert found["limits"].keys() == {"tb_per_s", "bf16_tflops"}
  assert [row["form"] for row in found["rows"]] == list(kernels.FORMS)
  bf16, nvfp4, *_ = found["rows"]
  assert bf16["ratio_to_bf16"] == 1
  assert nvfp4["ratio_to_bf16"] == bf16["us"] / nvfp4["us"]
  # 4 bits and a scale of 8 for 16, against 16.
  bytes_ = [row["tb_per_s"] * row["us"] for row in (bf16, nvfp4)]
  assert bytes_[0] / bytes_[1] == pytest.approx(16 / 4.5, rel=0.01)


def test_kernels_time_nothing_that_is_wrong(run, monkeypatch):
  monkeypatch.setitem(kernels.SHAPES, "small", ((96, 64),))
  monkeypatch.setattr(
    kernel_forms.xla, "extended_gemm", lambda rows, *_, **__: jnp.zeros((3, 96))
  )
  with pytest.raises(AutoematicError, match="nvfp4 of 3 x 96 x 64 is off by"):
    run("bench", "kernels", "--rows", "3", "--repeats", "1")


def test_kernels_are_drawn_by_shape_and_form(run, tmp_path, monkeypatch):
  monkeypatch.setitem(kernels.SHAPES, "small", ((96, 64), (64, 96)))
  picture = tmp_path / "kernels.png"
  run(
    *("bench", "kernels", "--rows", "1,3", "--repeats", "1"),
    *("--forms", "bf16,nvfp4,extended-k", "--plot", picture),
  )
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_decode_steps_of_large_shapes(run, tmp_path):
  report = tmp_path / "decode.json"
  code, out, _ = run(
    *("bench", "decode", "--models", "small", "--steps", "2"),
    *("--repeats", "1", "--batches", "1,2", "--contexts", "8"),
    *("--precisions", "nvfp4,adaptive", "--json", report),
  )
  assert code == 0
  assert "products by xla" in out
  assert "signals alone, small, batch 2" in out
  rows = json.loads(report.read_text())["rows"]
  assert [(row["precision"], row["batch"]) for row in rows] == [
    ("nvfp4", 1),
    ("nvfp4", 2),
    ("adaptive", 1),
    ("adaptive", 2),
  ]
  for row in rows:
    tokens = row["tokens_per_s"] * row["step_us"] / 1e6
    assert tokens == pytest.approx(row["batch"])


def test_unknown_models_are_named(run):
  with pytest.raises(AutoematicError, match="--models gpt.*qwen3-8b"):
    run("bench", "decode", "--models", "gpt")
  with pytest.raises(AutoematicError, match="--batches 0"):
    run("bench", "decode", "--batches", "0")


def test_unknown_forms_and_shapes_are_named(run):
  with pytest.raises(AutoematicError, match="--forms fp7.*nvfp4"):
    run("bench", "kernels", "--forms", "fp7")
  with pytest.raises(AutoematicError, match="--rows 0"):
    run("bench", "kernels", "--rows", "0")


def test_a_time_that_no_device_can_reach_is_taken_by_the_clock(
  run, tmp_path, monkeypatch
):
  monkeypatch.setitem(kernels.SHAPES, "small", ((96, 64),))
  monkeypatch.setattr(kernels, "_counts_kernels", lambda: True)
  monkeypatch.setattr(kernels, "_seconds", lambda *_: 1e-12)
  monkeypatch.setattr(kernels, "_clock", lambda *_: 1.0)
  found = {"tb_per_s": 1.0, "bf16_tflops": 1.0}
  monkeypatch.setattr(kernels, "limits", lambda: found)
  report = tmp_path / "kernels.json"
  run(*("bench", "kernels", "--rows", "3", "--forms", "bf16"), "--json", report)
  (row,) = json.loads(report.read_text())["rows"]
  assert (row["timed_by"], row["us"]) == ("clock", 1e6)
