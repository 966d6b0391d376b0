"""Scores of single answers, and of many with their intervals."""

import numpy as np
import pytest

from autoematic_jax.evaluation.tasks import answers
from autoematic_jax.evaluation.tasks import scoring
from autoematic_jax.evaluation.tasks.generation import Question
from autoematic_jax.evaluation.tasks.generation import batches


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("18", 18),
    ("so 3 + 4 = 7.", 7),
    ("It costs $1,234.50.", 1234.5),
    ("-$40", -40),
    ("a loss of -12,000 dollars", -12000),
    ("3-5 days", 5),
    ("#### 4400\n", 4400),
    ("18.0", 18),
    ("5, or .5", 0.5),
    ("1,2 and 3,", 3),
    ("none at all", None),
  ],
)
def test_the_last_number(text, expected):
  found = answers.last_number(text)
  assert found is None if expected is None else float(found) == expected


@pytest.mark.parametrize(
  ("text", "score"), [("It is 1,000.", 1), ("1000.00", 1), ("100", 0), ("", 0)]
)
def test_numbers_match_by_value(text, score):
  item = Question(name="n", prompt="?", answer="1000")
  assert answers.number(item, text) == {"score": score}


@pytest.mark.parametrize(
  ("text", "exact", "final"),
  [
    (" 1+2=3. Answer: 3\n", 1, 1),
    ("1+1=3. Answer: 3", 0, 1),
    ("1+2=3. Answer: 4", 0, 0),
    ("3", 0, 0),
  ],
)
def test_worked_answers_match_as_a_whole_or_at_the_end(text, exact, final):
  item = Question(name="n", prompt="?", answer="1+2=3. Answer: 3")
  scores = answers.worked(item, text)
  assert scores == {"score": exact, "final_score": final}


def test_code_is_completed_cut_and_tested():
  item = Question(
    name="n",
    prompt="def f(x):\n",
    answer="def check(f):\n  assert f(2) == 3\ncheck(f)\n",
  )
  assert answers.code(item, "  return x + 1\n\nprint(1 / 0)") == {"score": 1}
  assert answers.code(item, "  return x\n") == {"score": 0}


def records(scores, bits=4.0, passes=2):
  return [{"score": s, "bits": bits, "passes": passes} for s in scores]


def test_differences_are_paired_over_items():
  """Checked by the same draws, written out."""
  base, judged = [1, 1, 1, 0, 1, 1], [1, 0, 1, 0, 0, 1]
  found = scoring.summary(records(judged), records(base))
  assert found["score"] == pytest.approx(3 / 6)
  assert found["difference"] == pytest.approx(-2 / 6)
  picks = np.random.default_rng(0).integers(0, 6, (2000, 6))
  for values, low, high in (
    (judged, "low", "high"),
    (np.subtract(judged, base), "difference_low", "difference_high"),
  ):
    means = sorted(np.mean([values[i] for i in row]) for row in picks)
    assert found[low] == pytest.approx(np.quantile(means, 0.025))
    assert found[high] == pytest.approx(np.quantile(means, 0.975))
  # The same items, were they not paired, would leave room for a gain.
  assert found["difference_high"] <= 0


def test_a_row_compares_with_fp32_or_else_bf16():
  def rows(*names):
    by_precision = {name: records([1.0, 0.0]) for name in names}
    made = [{"precision": name} for name in names]
    scoring.add_to_rows(made, {"task": by_precision})
    return made

  assert scoring.baseline(["4", "bf16", "fp32"]) == "fp32"
  assert scoring.baseline(["4", "bf16"]) == "bf16"
  assert rows("bf16", "4")[1]["tasks"]["task"]["difference"] == 0
  (alone,) = rows("4")
  assert alone["tasks"]["task"]["difference"] is None
  assert alone["execution_bits"] == 4


def test_bits_of_a_row_are_the_text_s_or_the_mean_over_all_passes():
  found = {
    "long": {"4": records([1.0], bits=6.0, passes=30)},
    "short": {"4": records([1.0], bits=4.0, passes=10)},
  }
  rows = [{"precision": "4"}, {"precision": "4", "execution_bits": 5.0}]
  scoring.add_to_rows(rows, found)
  assert [row["execution_bits"] for row in rows] == [5.5, 5.0]
  assert rows[0]["tasks"]["short"]["execution_bits"] == 4


@pytest.mark.parametrize(
  ("count", "size", "expected"),
  [
    (2, 16, [[0, 1]]),
    (18, 16, [list(range(9)), list(range(9, 18))]),
    (5, 2, [[0, 1], [2, 3], [4, 4]]),
  ],
)
def test_batches_are_of_one_size(count, size, expected):
  assert batches(range(count), size) == expected
