"""What bodies may ask for, against an engine without a model."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from serving_fakes import FakeEngine
from serving_fakes import serving


@pytest.fixture(scope="module")
def client():
  engine = FakeEngine()
  with serving(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
    yield http
  assert engine._scheduler.pool.usage == 0


def complete(client, prompt="1", **options):
  body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
  answer = client.post("/v1/completions", json=body)
  assert answer.status_code == 200, answer.text
  return answer.json()["choices"][0]["text"]


def test_a_biased_token_is_taken(client):
  assert complete(client) == "2 3 4 5 "
  assert complete(client, logit_bias={"50": 100}) == "50 50 50 50 "
  assert complete(client, logit_bias={"3": -100})[:2] == "2 "
  assert "3 " not in complete(client, logit_bias={"3": -100}).split(" ")


def test_penalties_count_what_was_said(client):
  biased = {"logit_bias": {"50": 11}}
  assert complete(client, **biased) == "50 50 50 50 "
  # Each time that it was said costs 2; after one, it falls behind.
  assert complete(client, **biased, frequency_penalty=2).split()[:2] == [
    "50",
    "51",
  ]
  assert complete(client, **biased, presence_penalty=2).split()[:2] == [
    "50",
    "51",
  ]


def test_a_template_that_refuses_a_role_is_a_400(client):
  messages = [{"role": "system", "content": "1"}]
  answer = client.post("/v1/chat/completions", json={"messages": messages})
  assert answer.status_code == 400
  assert "no system role" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
  ("header", "status"),
  [(None, 401), ("Bearer wrong", 401), ("secret", 401), ("Bearer secret", 200)],
)
def test_only_who_has_the_key_is_served(header, status):
  with serving(FakeEngine(api_key="secret")) as url:
    headers = {} if header is None else {"authorization": header}
    body = {"prompt": "1", "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == status
    assert "secret" not in answer.text
    assert httpx.get(f"{url}/health").status_code == 200


_NUMBERS = st.integers() | st.floats() | st.booleans() | st.none()
_VALUES = st.recursive(
  _NUMBERS | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3)
  ),
  max_leaves=5,
)
_FIELDS = (
  "prompt",
  "messages",
  "max_tokens",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "seed",
  "n",
  "stop",
  "logprobs",
  "top_logprobs",
  "echo",
  "frequency_penalty",
  "logit_bias",
  "stream_options",
  "precision",
)


@settings(max_examples=150, deadline=None)
@given(
  route=st.sampled_from(["completions", "chat/completions"]),
  body=st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=4),
)
def test_no_body_breaks_the_server(client, route, body):
  begin = {"prompt": "1"}
  if route.startswith("chat"):
    begin = {"messages": [{"role": "user", "content": "1"}]}
  content = _json({**begin, "max_tokens": 2, **body})
  answer = client.post(f"/v1/{route}", content=content)
  assert answer.status_code in (200, 400, 404, 413)
  assert len(answer.content) < 5000
  if answer.status_code != 200:
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def _json(body):
  # NaN and Infinity too, which httpx would refuse to send.
  return json.dumps(body).encode("utf-8", "surrogatepass")
