"""Text comes as soon as it is certain, and never a stop string."""

import hypothesis
from hypothesis import strategies as st

from autoematic_jax.serving.detokenizer import Detokenizer
from autoematic_jax.tokenizer import StreamDecoder


def pieces(texts, stop):
  """What each of the texts, come as a token, makes visible; then the rest."""
  decoder = StreamDecoder(lambda ids: "".join(texts[i] for i in ids))
  detokenizer = Detokenizer(decoder, stop)
  shown = []
  for token in range(len(texts)):
    shown.append(detokenizer.push(token))
    if detokenizer.stopped:
      break
  shown.append(detokenizer.flush())
  return shown, detokenizer.stopped


def test_nothing_of_a_stop_string_is_shown():
  shown, stopped = pieces(["abC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"])
  assert stopped
  assert "".join(shown) == "abC"


def test_only_what_may_become_a_stop_string_waits():
  stop = "x" * 40
  shown, stopped = pieces(["hello ", "wor", "ld x", "x", "."], [stop])
  assert shown == ["hello ", "wor", "ld ", "", "xx.", ""]
  assert not stopped


def test_what_waited_comes_at_the_end():
  assert pieces(["a", "DE"], ["DEF"]) == (["a", "", "DE"], False)


def test_half_a_character_waits_for_its_other_half():
  data = [b"\xc4", b"\x8f", b"!"]
  decoder = StreamDecoder(
    lambda ids: b"".join(data[i] for i in ids).decode(errors="replace")
  )
  detokenizer = Detokenizer(decoder)
  assert [detokenizer.push(token) for token in range(3)] == ["", "\u010f", "!"]


@hypothesis.given(
  texts=st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
  stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
)
def test_stream_is_the_text_before_the_first_stop(texts, stop):
  shown, stopped = pieces(texts, stop)
  seen = ""
  expected = "".join(texts)
  for text in texts:
    seen += text
    found = [seen.find(s) for s in stop if s in seen]
    if found:
      expected = seen[: min(found)]
      break
  assert stopped == any(s in seen for s in stop)
  assert "".join(shown) == expected
