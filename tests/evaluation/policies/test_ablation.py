"""Settings of the policy over recorded signals, and the one that is chosen."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.evaluation.policies import ablation
from autoematic_jax.evaluation.policies import signal_reports
from autoematic_jax.policy import PolicyConfig

LAYERS = 6


def conversation(rng, kinds, wanted):
  """An entry of `signals`; `wanted` are the oracle's bits of every layer."""
  shape = (len(kinds), LAYERS)
  return {
    "name": "told",
    "kinds": list(kinds),
    "activity": rng.uniform(0.1, 1, shape).round(3).tolist(),
    "entropy": rng.uniform(0, 1, len(kinds)).round(3).tolist(),
    "oracle_levels": np.broadcast_to(wanted, shape).tolist(),
  }


def whole_report(wanted, *, levels=(2, 4, 6)):
  """A report of as many conversations as there are oracle's levels."""
  rng = np.random.default_rng(0)
  kinds = ("prefill", *["decode"] * 5, "refill", *["decode"] * 3)
  return {
    "checkpoint": "some/model",
    "oracle": {"file": "oracle.json", "budget": 0.001},
    "policy": PolicyConfig(levels=levels, high_entropy_level=2).to_dict(),
    "signals": [conversation(rng, kinds, bits) for bits in wanted],
  }


@pytest.fixture
def written(tmp_path):
  """Writes a report; returns its path."""

  def call(report, name="policies.json"):
    file = str(tmp_path / name)
    Path(file).write_text(json.dumps(report))
    return file

  return call


@pytest.fixture
def load(written):
  count = itertools.count()
  return lambda *args, **options: signal_reports.read(
    written(whole_report(*args, **options), f"{next(count)}.json")
  )


def test_one_level_is_scored_as_it_must_be(load):
  """Halves go 0110; what is above and below can be counted by hand."""
  report = load([4, 2, 6, 4])
  settings = [{}, {"levels": [4]}]
  fixed = ablation.measure([report], settings)[1].scores[report.name]
  assert fixed["first"]["all"] == {
    "underprovision": 0.0,
    "overprovision": 0.0,
    "execution_bits": 4.0,
  }
  for part in ablation.PARTS:
    assert fixed["second"][part]["underprovision"] == 0.5
    assert fixed["second"][part]["overprovision"] == 0.5
    assert fixed["all"][part]["underprovision"] == 0.25


def test_a_setting_changes_what_is_replayed(load):
  report = load([4, 4])
  settings = [{}, {"alpha": 1, "beta": 1}, {"decode_initial_level": 6}]
  bits = [
    result.mean("all", "decode")["execution_bits"]
    for result in ablation.measure([report], settings)
  ]
  assert bits[2] > bits[0] != bits[1]
  prefill = {
    result.mean("all", "prefill")["execution_bits"]
    for result in ablation.measure([report], settings)
  }
  assert prefill == {6.0}


def test_the_lowest_bits_that_keep_the_limit_are_chosen(load):
  """On the first half 4 bits are enough everywhere; on the other they lack."""
  report = load([4, 6, 6, 4])
  settings = [{}, {"levels": [6]}, {"levels": [4]}, {"levels": [2]}]
  results = ablation.measure([report], settings)
  chosen = ablation.choose(results, max_under=0.0)
  assert chosen.setting == {"levels": [4]}
  assert chosen.mean("second", "all")["underprovision"] == 1.0
  assert ablation.choose(results, max_under=1.0).setting == {"levels": [2]}


def test_where_none_keeps_the_limit_the_least_is_missed(load):
  report = load([6, 6])
  settings = [{}, {"levels": [2]}, {"levels": [2, 4]}]
  results = ablation.measure([report], settings)
  unders = [r.mean("first", "all")["underprovision"] for r in results]
  assert min(unders) == unders[0] > 0
  assert ablation.choose(results, max_under=0.0) is results[0]


def test_of_equal_settings_the_first_is_chosen(load):
  report = load([4, 4])
  # Nothing spikes, so that prefills run alike.
  settings = [{"spike_sigmas": s, "levels": [4, 6]} for s in (50.0, 60.0, 70.0)]
  for order in (settings, settings[::-1]):
    results = ablation.measure([report], order)
    assert ablation.choose(results, max_under=1.0).setting == order[0]


def test_models_of_any_number_of_conversations_count_the_same(load):
  small, large = load([4, 4]), load([6] * 6)
  result = ablation.measure([small, large], [{"levels": [4]}])[0]
  assert result.mean("all", "all")["underprovision"] == 0.5


def test_every_constant_is_varied_once(load):
  report = load([4, 4], levels=(4, 6))
  settings = ablation.one_at_a_time([report])
  assert settings[0] == {}
  varied = {field for setting in settings for field in setting}
  fixed = {"entropy_top_k", "epsilon", "kv_min_level", "reduction"}
  assert varied >= {
    "alpha",
    "beta",
    "tau",
    "lambda_decode",
    "prefill_run",
    "spike_sigmas",
    "skip_layers",
    "min_stats",
    "stats_scope",
    "decode_initial_level",
    "high_entropy_level",
    "levels",
  }
  assert not varied & fixed
  policies = [ablation.apply(report, setting) for setting in settings]
  assert len(set(policies)) == len(policies)
  assert {"levels": [4]} in settings


def test_levels_are_those_that_all_models_hold(load):
  reports = [load([4, 4]), load([4, 4], levels=(4, 6))]
  levels = [
    s["levels"] for s in ablation.one_at_a_time(reports) if "levels" in s
  ]
  assert sorted(levels) == [[4], [4, 6], [6]]


def test_a_grid_holds_every_combination(load):
  values = {"alpha": [2, 4], "beta": [2, 3]}
  settings = ablation.grid(values, [load([4, 4])])
  # With alpha 4 and beta 2 it is the recorded policy.
  assert settings == [
    {},
    {"alpha": 2, "beta": 2},
    {"alpha": 2, "beta": 3},
    {"alpha": 4, "beta": 3},
  ]


def test_settings_are_tried_drawn_and_written(run, written, tmp_path):
  file = written(whole_report([4, 6, 4, 4]))
  other = written(whole_report([6, 6], levels=(4, 6)), "other")
  words = ["ablate", file, other, "--json", tmp_path / "out.json"]
  words += ["--grid", "alpha=2,4", "levels=[4],[4,6]", "--max-under", "0.5"]
  code, out = run(*words, "--plot", tmp_path / "out.png")
  assert code == 0
  assert image.imread(tmp_path / "out.png").std() > 0
  report = json.loads((tmp_path / "out.json").read_text())
  assert len(report["rows"]) == 2 * 5
  assert [row["report"] for row in report["rows"][:2]] == [file, other]
  assert set(report["rows"][0]["scores"]["all"]) == set(ablation.PARTS)
  # 4 bits are enough for one report's first half, and never for the other's.
  assert report["chosen"]["levels"] == [4]
  assert "alpha=2 levels=4,6" in out
  assert run(*words)[1].startswith(out[:200])


@pytest.mark.parametrize(
  ("more", "error", "message"),
  [
    (["--grid", "gamma=1"], AutoematicError, "--grid gamma=1: expected FIELD"),
    (["--grid", "alpha="], AutoematicError, "--grid alpha=: expected FIELD"),
    (["--grid", "alpha=2,x"], AutoematicError, "alpha takes a value like 4"),
    (["--grid", "levels=4,6"], AutoematicError, "levels takes a value like"),
    (["--grid", "alpha=0"], PrecisionError, "alpha=0 must be >= 1"),
    (["--grid", "stats_scope=x"], PrecisionError, "stats_scope='x' must be"),
    (["--grid", "alpha=1", "alpha=2"], AutoematicError, "alpha is given twice"),
    (["--grid", "epsilon=0.1"], AutoematicError, "epsilon: part of how the"),
    (["--grid", "levels=[4,8]"], AutoematicError, r"recorded with \[2, 4, 6\]"),
    (["--max-under", "1.5"], AutoematicError, "--max-under 1.5"),
    (["--max-under", "nan"], AutoematicError, "--max-under nan"),
  ],
)
def test_bad_settings_are_named(run, written, tmp_path, more, error, message):
  file = written(whole_report([4, 4]))
  with pytest.raises(error, match=message):
    run("ablate", file, "--json", tmp_path / "out.json", *more)
  assert not (tmp_path / "out.json").exists()


def without(report, key):
  return {name: value for name, value in report.items() if name != key}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda r: [], "holds no signals"),
    (lambda r: without(r, "signals"), "holds no signals"),
    (lambda r: without(r, "policy"), "lacks 'policy'"),
    (lambda r: {**r, "signals": r["signals"][:1]}, "one conversation only"),
    (
      lambda r: {**r, "signals": [without(r["signals"][0], "oracle_levels")]},
      "lacks 'oracle_levels'",
    ),
    (
      lambda r: {**r, "signals": [{**r["signals"][0], "kinds": ["decode"]}]},
      "told: signals of",
    ),
    (
      lambda r: {**r, "signals": [{**r["signals"][0], "kinds": ["x"] * 10}]},
      "unknown kinds of pass",
    ),
    (
      lambda r: {
        **r,
        "signals": [{**r["signals"][0], "oracle_levels": [[4] * 5] * 10}],
      },
      "signals of 10 x 6 passes and layers, the oracle's levels of 10 x 5",
    ),
    (
      lambda r: {
        **r,
        "signals": [{**r["signals"][0], "activity": [[1.0], [1.0, 2.0]]}],
      },
      "policies.json: ",
    ),
  ],
)
def test_bad_reports_are_named(run, written, tmp_path, change, message):
  file = written(change(whole_report([4, 4])))
  with pytest.raises(AutoematicError, match=message):
    run("ablate", file, "--json", tmp_path / "out.json")


def test_reports_that_cannot_be_told_apart_are_refused(run, written, tmp_path):
  file = written(whole_report([4, 4]))
  with pytest.raises(AutoematicError, match="policies.json is given twice"):
    run("ablate", file, file, "--json", tmp_path / "out.json")


def test_a_kind_that_did_not_occur_cannot_decide(run, written, tmp_path):
  report = whole_report([4, 4])
  for entry in report["signals"]:
    entry["kinds"] = ["prefill", *["decode"] * 9]
  with pytest.raises(AutoematicError, match="no refill among the passes"):
    run(
      "ablate",
      written(report),
      "--json",
      tmp_path / "out.json",
      *("--kind", "refill", "--grid", "alpha=2"),
    )
