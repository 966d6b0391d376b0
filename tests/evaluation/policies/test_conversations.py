"""Conversations as tokens, and their full-precision answers."""

import copy
import dataclasses
import json

import numpy as np
import pytest

import autoematic_jax
from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.policies import conversations
from autoematic_jax.evaluation.policies import recording
from autoematic_jax.evaluation.policies.conversations import Conversation
from autoematic_jax.evaluation.policies.passes import Pass
from autoematic_jax.evaluation.policies.passes import Session
from autoematic_jax.evaluation.policies.passes import capacity_of
from autoematic_jax.evaluation.policies.passes import passes_of
from autoematic_jax.models.reference import problem_file

CAPACITY = 128


def user(text):
  return {"role": "user", "content": text}


def test_turns_and_answers_join_to_what_the_template_writes(baseline):
  tokenizer = baseline.tokenizer
  told = Conversation(
    name="chat",
    turns=(
      ({"role": "system", "content": "people"}, user("The capital?")),
      (user("live there"),),
    ),
  )
  turns = conversations.encode(baseline, told)
  for answer in ("Paris", "Paris<|im_end|>"):
    ids = tokenizer.encode(answer)
    passes = passes_of(turns, [ids, tokenizer.encode("France<|im_end|>")])
    read = [token for step in passes for token in step.tokens]
    expected = tokenizer.apply_chat_template(
      [
        *told.turns[0],
        {"role": "assistant", "content": "Paris"},
        *told.turns[1],
        {"role": "assistant", "content": "France"},
      ],
      add_generation_prompt=False,
    )
    # The last token is drawn and never read; the template ends in a new line.
    assert [*read, 2, *tokenizer.encode("\n")] == tokenizer.encode(expected)
    starts = np.cumsum([0, *(len(step.tokens) for step in passes)])
    assert [step.start for step in passes] == starts[:-1].tolist()


def test_answers_are_those_of_generation(baseline):
  told = Conversation(name="raw", turns=("def f(x):",))
  found = recording.record(
    baseline, told, max_new_tokens=6, capacity=CAPACITY
  ).answers
  result = autoematic_jax.generate(baseline, "def f(x):", max_new_tokens=6)
  assert found == result.token_ids


def test_a_refill_sees_what_one_pass_sees(baseline, recordings):
  passes = recordings[0].passes
  session = Session(baseline, CAPACITY)
  outputs = [session.run(step) for step in passes]
  tokens = sum((step.tokens for step in passes), ())
  whole = Session(baseline, CAPACITY).run(
    Pass(kind="prefill", tokens=tokens, start=0)
  )
  np.testing.assert_allclose(
    outputs[-1].log_probabilities, whole.log_probabilities, atol=1e-3
  )


def test_a_long_conversation_shares_the_context(baseline):
  """Later turns and their answers keep their room."""
  told = Conversation(name="long", turns=("Paris " * 20, "France " * 10, "a"))
  room = recording.room(baseline, conversations.encode(baseline, told), 999)
  found = recording.record(baseline, told, max_new_tokens=999, capacity=room)
  read = sum(len(step.tokens) for step in found.passes)
  assert read <= baseline.config.max_positions
  assert capacity_of(found.passes) <= room


def test_an_end_token_ends_an_answer(baseline):
  told = Conversation(name="two", turns=("def f(x):", " France"))
  free = recording.record(baseline, told, max_new_tokens=5, capacity=CAPACITY)
  tokenizer = copy.copy(baseline.tokenizer)
  tokenizer.eos_ids = (free.answers[0][2],)
  ended = recording.record(
    dataclasses.replace(baseline, tokenizer=tokenizer),
    told,
    max_new_tokens=5,
    capacity=CAPACITY,
  )
  first = free.answers[0]
  assert ended.answers[0] == first[: first.index(first[2]) + 1]


def test_problems_come_alone_and_in_a_row():
  told = conversations.load_task("reference")
  assert [len(item.turns) for item in told[:4]] == [1, 3, 1, 3]
  assert [item.name for item in told[:2]] == ["problem 1", "problem 2-4"]
  problems = problem_file.load(problem_file.SHIPPED)
  asked = [turn[0]["content"] for item in told for turn in item.turns]
  assert asked == [problem.prompt for problem in problems]


def test_shipped_chats_have_refills():
  told = conversations.load_task("chat")
  assert len(told) == 16
  assert all(2 <= len(item.turns) <= 4 for item in told)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", "line 2: not JSON"),
    ('{"text": "a"}', "line 2: 'turns' must be a list"),
    ('{"turns": []}', "line 2: 'turns' must be a list"),
    ('{"turns": ["a", ""]}', "line 2: a turn is an empty text"),
    ('{"turns": [[], ["a"]]}', "line 2: turn 1 must be a list of messages"),
    (
      '{"turns": [[{"role": "user", "content": "a"}], "b"]}',
      "line 2: turn 2 must be a list of messages",
    ),
    ('{"turns": [[{"role": "user"}]]}', "line 2: turn 1: a message needs"),
    (
      '{"turns": [[{"role": "assistant", "content": "a"}]]}',
      "line 2: turn 1 holds an answer",
    ),
  ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
  file = tmp_path / "told.jsonl"
  file.write_text(json.dumps({"turns": ["a", "b"]}) + "\n" + line + "\n")
  with pytest.raises(AutoematicError, match=message):
    conversations.load_file(file)


def test_what_does_not_fit_the_context_is_named(baseline):
  told = Conversation(name="line 7", turns=("Paris " * 60, " France" * 60))
  with pytest.raises(AutoematicError, match="line 7: .* leave no room"):
    conversations.encode(baseline, told)


def test_a_missing_template_is_named(baseline):
  tokenizer = copy.copy(baseline.tokenizer)
  tokenizer._chat_template = None
  model = dataclasses.replace(baseline, tokenizer=tokenizer)
  told = Conversation(name="line 1", turns=((user("a"),),))
  with pytest.raises(AutoematicError, match="line 1: .* no chat template"):
    conversations.encode(model, told)
