"""`autoematic oracle` and `autoematic policies` from end to end."""

import argparse
import json

import pytest
from matplotlib import image

from autoematic_jax.cli import arguments
from autoematic_jax.errors import AutoematicError
from autoematic_jax.policy import PolicyConfig

TOLD = [
  {"turns": ["The capital of", " is Paris"]},
  {"turns": [[{"role": "user", "content": "people"}]]},
  {"turns": ["def f(x):"]},
]


@pytest.fixture
def words(checkpoints, tmp_path):
  """A command line of the oracle without its options."""
  told = tmp_path / "told.jsonl"
  told.write_text("".join(json.dumps(line) + "\n" for line in TOLD))
  words = ["oracle", checkpoints["autofp6"], "--baseline", checkpoints["fp32"]]
  words += ["--conversations", told, "--max-new-tokens", 4]
  return [*words, "--json", tmp_path / "oracle.json"]


def test_a_trace_is_made_and_policies_are_compared_with_it(
  run, words, checkpoints, tmp_path
):
  journal, picture = tmp_path / "journal", tmp_path / "levels.png"
  words += ["--budget", "0.01", "--resume", journal, "--plot", picture]
  code, out = run(*words)
  assert code == 0
  report = json.loads((tmp_path / "oracle.json").read_text())
  assert report["levels"] == [2, 4, 6]
  assert [row["name"] for row in report["rows"]] == [
    "line 1",
    "line 2",
    "line 3",
  ]
  assert report["summary"]["all"]["passes"] == sum(
    len(row["passes"]) for row in report["rows"]
  )
  assert image.imread(picture).std() > 0

  # One conversation remains, and the line that was being written is cut off.
  lines = journal.read_text().splitlines()
  journal.write_text("\n".join(lines[:3]) + "\n" + lines[3][:50])
  assert run(*words) == (0, out)
  assert json.loads((tmp_path / "oracle.json").read_text()) == report
  with pytest.raises(AutoematicError, match="another measurement"):
    run(*words, "--budget", "0.5")

  compare = ["policies", checkpoints["autofp6"], "--baseline"]
  compare += [checkpoints["fp32"], "--oracle", tmp_path / "oracle.json"]
  compare += ["--json", tmp_path / "policies.json"]
  compare += ["--resume", tmp_path / "policies.journal"]
  code, out = run(*compare)
  assert code == 0
  assert "mean KL" in out
  compared = json.loads((tmp_path / "policies.json").read_text())
  assert len(compared["signals"]) == 3
  (tmp_path / "policies.json").unlink()
  assert run(*compare) == (0, out)
  assert json.loads((tmp_path / "policies.json").read_text()) == compared

  varied = ["ablate", tmp_path / "policies.json", "--grid", "alpha=4"]
  code, out = run(*varied, "--json", tmp_path / "ablation.json")
  assert code == 0
  found = json.loads((tmp_path / "ablation.json").read_text())
  adaptive = compared["rows"][0]
  for name, value in found["rows"][0]["scores"]["all"]["all"].items():
    assert value == adaptive[name]


@pytest.mark.parametrize(
  ("more", "message"),
  [
    (["--budget", "-1"], "--budget -1.0 must be >= 0"),
    (["--budget", "nan"], "--budget nan must be >= 0"),
    (["--limit", "0"], "--limit 0"),
    (["--max-new-tokens", "0"], "--max-new-tokens 0"),
    (["--levels", "4,8"], "the checkpoint holds"),
    (["--levels", "four"], "--levels 'four'"),
  ],
)
def test_bad_input_of_the_oracle_is_named(run, words, more, message):
  with pytest.raises(AutoematicError, match=message):
    run(*words, *more)


@pytest.mark.parametrize(
  ("report", "more", "message"),
  [
    ("[]", [], "not a report that autoematic oracle"),
    ('{"rows": []}', [], "not a report that autoematic oracle"),
    ("{", [], "--oracle"),
    (None, [], r"--policy-option levels=\[4,6\] makes them agree"),
    (None, ["--policy-option", "alpha"], "expected FIELD=VALUE"),
    (None, ["--policy-option", "gamma=1"], "with a field out of levels"),
    (None, ["--policy-option", "alpha=2.5"], "alpha takes a value like 4"),
    (None, ["--policy-option", "tau=x"], "tau takes a value like 0.05"),
    (None, ["--policy-option", "levels=[4,null]"], "levels takes a value like"),
    (None, ["--policy-option", "alpha=0"], "alpha=0 must be >= 1"),
    (None, ["--windows", "0"], "--windows 0"),
    (None, ["--seed", "-1"], "--seed -1"),
  ],
)
def test_bad_input_of_policies_is_named(
  run, checkpoints, rows, tmp_path, report, more, message
):
  file = tmp_path / "oracle.json"
  whole = {"levels": [4, 6], "budget": 0.01, "rows": rows}
  file.write_text(json.dumps(whole) if report is None else report)
  words = ["policies", checkpoints["autofp6"], "--baseline"]
  words += [checkpoints["fp32"], "--oracle", file]
  with pytest.raises(AutoematicError, match=message):
    run(*words, "--json", tmp_path / "policies.json", *more)


def test_a_trace_of_another_model_is_refused(run, checkpoints, rows, tmp_path):
  rows = json.loads(json.dumps(rows))
  for step in rows[0]["passes"]:
    step["levels"] = step["levels"][:-1]
  file = tmp_path / "oracle.json"
  file.write_text(json.dumps({"levels": [2, 4, 6], "budget": 1, "rows": rows}))
  words = ["policies", checkpoints["autofp6"], "--baseline"]
  words += [checkpoints["fp32"], "--oracle", file, "--json", tmp_path / "out"]
  with pytest.raises(AutoematicError, match="a model of 5 layers"):
    run(*words)


def test_options_override_the_file_of_a_policy(tmp_path):
  file = tmp_path / "policy.json"
  file.write_text('{"alpha": 3, "beta": 3}')
  parser = argparse.ArgumentParser()
  arguments.add_policy(parser)
  words = ["--policy", str(file)]
  for option in ("beta=1", "reduction=token_mean", "tau=1", "levels=[4,6]"):
    words += ["--policy-option", option]
  found = arguments.read_policy(parser.parse_args(words), PolicyConfig())
  assert found == PolicyConfig(
    alpha=3, beta=1, reduction="token_mean", tau=1.0, levels=(4, 6)
  )
