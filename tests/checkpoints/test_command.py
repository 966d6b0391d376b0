"""`autoematic convert` as it is typed."""

import json

import pytest

from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.cli import main
from autoematic_jax.errors import PrecisionError


def run(*words):
  args = main.parse_arguments(["autoematic", "convert", *map(str, words)])
  return args.run(args)


def test_it_converts_and_reports(gguf_file, tmp_path, capsys):
  out = tmp_path / "out"
  words = ["--format", "autofp8", "--levels", "4,6,8", "--rho", "0.1"]
  assert run(gguf_file(), out, *words, "--policy", '{"tau": 0.5}') == 0
  checkpoint = load_checkpoint(out)
  assert checkpoint.levels == (4, 6, 8)
  assert checkpoint.policy["tau"] == 0.5
  assert (out / "tokenizer.json").exists()
  captured = capsys.readouterr()
  report = dict(line.split(None, 1) for line in captured.out.splitlines())
  assert report["format"] == "autofp8"
  assert report["levels"] == "4, 6, 8"
  assert report["stored"] == (
    f"{checkpoint.stored_bits:.3f} bits per quantized weight"
  )
  assert report["weights"].endswith(" MB")
  assert report["time"].endswith(" s")
  assert "peak" in report
  assert "model.layers.1" in captured.err
  assert "100%" in captured.err


def test_quiet_shows_no_progress(gguf_file, tmp_path, capsys):
  assert run(gguf_file(), tmp_path / "out", "--format", "bf16", "--quiet") == 0
  captured = capsys.readouterr()
  assert captured.err == ""
  assert "levels       none" in captured.out
  assert "16." in captured.out
  assert "bits per weight" in captured.out


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--levels", "4;6"], "--levels '4;6': expected numbers"),
    (["--levels", "3"], r"levels \(3,\)"),
    (["--policy", "{"], "--policy '{' is not JSON"),
    (["--policy", "[1]"], "must be a JSON object"),
    (["--policy", json.dumps({"none": 1})], "unknown keys"),
  ],
)
def test_words_that_make_no_sense_are_refused(tmp_path, words, message):
  with pytest.raises(PrecisionError, match=message):
    run(tmp_path / "nowhere", tmp_path / "out", *words)


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path, capsys):
  with pytest.raises(SystemExit):
    run(tmp_path, tmp_path / "out", "--format", "int4")
  assert "autofp6" in capsys.readouterr().err
