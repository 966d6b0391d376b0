"""Reports that several models and runs share."""

import json

from autoematic_jax.evaluation import reports


def test_rows_replace_those_that_agree_in_all_keys(tmp_path):
  path = tmp_path / "report.json"

  def merge(model, *rows, command):
    rows = [{"model": model, **row} for row in rows]
    reports.merge(
      path, rows, model=model, keys=("model", "precision"), command=command
    )
    return json.loads(path.read_text())

  merge(
    "a", {"precision": "4", "kl": 3}, {"precision": "6", "kl": 1}, command="x"
  )
  merge("b", {"precision": "4", "kl": 5}, command="y")
  report = merge("a", {"precision": "4", "kl": 2}, command="z")
  assert report["rows"] == [
    {"model": "a", "precision": "6", "kl": 1},
    {"model": "b", "precision": "4", "kl": 5},
    {"model": "a", "precision": "4", "kl": 2},
  ]
  assert report["command"] == {"a": "z", "b": "y"}
  assert report["machine"]
  assert report["versions"]["jax"]
