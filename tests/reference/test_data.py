import numpy as np
import pytest

from autoematic_jax.models.reference import data
from autoematic_jax.models.reference import vocabulary

TEXT = np.arange(1000, 1500, dtype=np.uint16)
MIXTURE = data.Mixture(steps=2, batch=4, window=96, text_share=0.4)


def chunks(tokenizer, first, last, workers=0, mixture=MIXTURE):
  stream = data.load_chunks(
    mixture,
    tokenizer.to_str(),
    TEXT,
    first=first,
    last=last,
    workers=workers,
  )
  return list(stream)


def equal(a, b):
  return all(
    np.array_equal(x, y)
    for one, two in zip(a, b, strict=True)
    for x, y in zip(one, two, strict=True)
  )


def test_a_chunk_has_its_shape(tokenizer):
  (chunk,) = chunks(tokenizer, 0, 1)
  assert chunk.tokens.shape == (2, 4, 97)
  assert chunk.counted.shape == (2, 4, 96)


def test_a_run_that_continues_sees_the_same_chunks(tokenizer):
  whole = chunks(tokenizer, 0, 4)
  assert equal(whole, chunks(tokenizer, 0, 2) + chunks(tokenizer, 2, 4))
  assert not equal(whole[:1], whole[1:2])


def test_another_seed_gives_other_problems(tokenizer):
  other = data.Mixture(steps=2, batch=4, window=96, text_share=0.0, seed=1)
  same = data.Mixture(steps=2, batch=4, window=96, text_share=0.0)
  assert not equal(
    chunks(tokenizer, 0, 1, mixture=same),
    chunks(tokenizer, 0, 1, mixture=other),
  )


@pytest.mark.slow
def test_processes_make_the_same_chunks_in_order(tokenizer):
  assert equal(chunks(tokenizer, 0, 4), chunks(tokenizer, 0, 4, workers=2))


def test_windows_hold_problems_or_a_piece_of_text(tokenizer):
  (chunk,) = chunks(tokenizer, 0, 1)
  user = vocabulary.token_id(tokenizer, vocabulary.USER)
  rows = chunk.tokens.reshape(-1, 97)
  is_problem = rows[:, 0] == user
  assert is_problem.any()
  assert not is_problem.all()
  for row in rows[~is_problem]:
    assert (np.diff(row.astype(int)) == 1).all()
  assert chunk.counted.reshape(-1, 96)[~is_problem].all()


def test_only_answers_of_problems_count(tokenizer):
  mixture = data.Mixture(steps=1, batch=4, window=200, text_share=0.0)
  (chunk,) = chunks(tokenizer, 0, 1, mixture=mixture)
  end, assistant = (
    vocabulary.token_id(tokenizer, name)
    for name in (vocabulary.END, vocabulary.ASSISTANT)
  )
  for row, counted in zip(chunk.tokens[0], chunk.counted[0], strict=True):
    answering = False
    for token, target, counts in zip(row, row[1:], counted, strict=False):
      answering = token == assistant or (answering and token != end)
      assert counts == answering, (token, target)


def test_text_shorter_than_a_window_is_an_error(tokenizer):
  with pytest.raises(ValueError, match="do not fill"):
    data.ChunkMaker(MIXTURE, tokenizer, TEXT[:96])


def test_text_is_not_seen_too_often():
  share = {"text_tokens": 100, "all_tokens": 10000}
  assert data.limited_text_share(0.3, **share, epochs=5.0) == 0.05
  assert data.limited_text_share(0.3, **share, epochs=50.0) == 0.3
