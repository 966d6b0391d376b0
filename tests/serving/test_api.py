"""The official client against a real model: every answer is its own."""

import concurrent.futures

import httpx
import openai
import pytest
from serving_fakes import serving

import autoematic_jax
from autoematic_jax.checkpoints import convert
from autoematic_jax.models.reference import vocabulary
from autoematic_jax.serving.config import ServeConfig
from autoematic_jax.serving.engine import Engine

# The longest spans two chunks, and any two share their beginning.
PROMPTS = ["The river " * n for n in (1, 30, 80)]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
  path = tmp_path_factory.mktemp("serving") / "autofp6"
  convert(vocabulary.MODEL_FOLDER, path, progress=False)
  return autoematic_jax.load(path)


@pytest.fixture(scope="session")
def engine(model):
  # Few pages: three requests at once do not always fit.
  return Engine(model, ServeConfig(max_tokens=256, max_running=3, pages=16))


@pytest.fixture(scope="session")
def url(engine):
  with serving(engine, "reference") as address:
    yield address


@pytest.fixture
def client(url):
  with openai.OpenAI(
    base_url=f"{url}/v1", api_key="none", max_retries=0
  ) as client:
    yield client


def complete(client, prompt, **options):
  options = {"temperature": 0, "max_tokens": 12, **options}
  return client.completions.create(model="reference", prompt=prompt, **options)


def test_answers_are_those_of_generate_alone_and_in_company(client, engine):
  mixed = [(p, b) for p in PROMPTS for b in (4, 6)] * 2

  def ask(prompt, bits):
    body = {"precision": bits, "ignore_eos": True}
    return complete(client, prompt, extra_body=body).choices[0].text

  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    together = list(pool.map(lambda pair: ask(*pair), mixed))
  assert [ask(*pair) for pair in mixed] == together
  expected = [
    autoematic_jax.generate(
      engine.model,
      prompt,
      max_new_tokens=12,
      precision=bits,
      ignore_eos=True,
    ).texts[0]
    for prompt, bits in mixed[:2]
  ]
  assert together[:2] == expected


def test_adaptive_answers_do_not_depend_on_prefix_hits(client):
  prompt = "One more river. " * 40
  first, second = (complete(client, prompt) for _ in range(2))
  assert first.usage.prompt_tokens_details.cached_tokens == 0
  assert second.usage.prompt_tokens_details.cached_tokens == 128
  assert first.choices[0].text == second.choices[0].text


def test_stream_is_the_whole_answer(client):
  whole = complete(client, PROMPTS[0])
  chunks = list(
    complete(
      client, PROMPTS[0], stream=True, stream_options={"include_usage": True}
    )
  )
  assert len({chunk.id for chunk in chunks}) == 1
  texts = [c.choices[0].text for c in chunks if c.choices]
  assert "".join(texts) == whole.choices[0].text
  reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
  assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
  assert chunks[-1].choices == []
  assert chunks[-1].usage.completion_tokens == 12


def test_chat_streams_the_role_first(client):
  asked = {
    "model": "reference",
    "messages": [{"role": "user", "content": "What is 3 + 4?"}],
    "temperature": 0,
    "max_completion_tokens": 8,
    "logprobs": True,
    "top_logprobs": 5,
  }
  whole = client.chat.completions.create(**asked).choices[0]
  first, *rest = client.chat.completions.create(**asked, stream=True)
  assert first.choices[0].delta.role == "assistant"
  text = "".join(c.choices[0].delta.content or "" for c in rest)
  assert text == whole.message.content
  entry = whole.logprobs.content[0]
  assert entry.logprob == entry.top_logprobs[0].logprob <= 0
  assert len(entry.top_logprobs) == 5


def test_echo_without_new_tokens_scores_the_prompt(client):
  choice = complete(
    client, "The river", max_tokens=0, echo=True, logprobs=1
  ).choices[0]
  assert choice.text == "The river"
  assert choice.logprobs.token_logprobs[0] is None
  assert all(p <= 0 for p in choice.logprobs.token_logprobs[1:])
  assert choice.logprobs.text_offset[0] == 0


def test_a_seed_repeats_its_distinct_choices(client):
  def texts(**options):
    answer = complete(client, "The river", temperature=1.5, n=3, **options)
    return [choice.text for choice in answer.choices]

  assert texts(seed=7) == texts(seed=7)
  assert len(set(texts(seed=7))) == 3
  assert texts() != texts()


def test_top_k_of_one_is_greedy(client):
  greedy = complete(client, "The river", max_tokens=6)
  one = complete(
    client, "The river", max_tokens=6, temperature=2, extra_body={"top_k": 1}
  )
  assert one.choices[0].text == greedy.choices[0].text


def test_routes_beside_the_api(url, client):
  assert [m.id for m in client.models.list()] == ["reference"]
  with httpx.Client(base_url=url) as http:
    tokens = http.post("/tokenize", json={"prompt": "The river"}).json()
    back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "The river"}
    assert http.get("/version").json()["version"] == autoematic_jax.__version__


@pytest.mark.parametrize(
  "prompt", ["", [], [""], [[-1]], [[10**9]], [0] * 256, None, {"a": 1}]
)
def test_prompts_that_cannot_be_served_are_refused(url, prompt):
  body = {"prompt": prompt, "max_tokens": 1}
  answer = httpx.post(f"{url}/v1/completions", json=body)
  assert answer.status_code == 400
  assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
  "body",
  [
    b"{x}",
    b"[]",
    b"null",
    b'"s"',
    b"[" * 1000 + b"]" * 1000,
    b'{"prompt": [' + b'"a", ' * 5000 + b"{}]}",
    b'{"prompt": "a", "n": 100000}',
    b'{"prompt": "a", "stream_options": {}}',
    b"\xff\xfe",
  ],
)
def test_broken_bodies_get_a_short_400(url, body):
  answer = httpx.post(f"{url}/v1/completions", content=body)
  assert answer.status_code == 400
  assert len(answer.content) < 600


def test_client_raises_what_it_is_told(client, url):
  with pytest.raises(openai.NotFoundError):
    client.completions.create(model="other", prompt="a")
  answer = httpx.post(f"{url}/v1/completions", content=b" " * (5 << 20))
  assert answer.status_code == 413


def test_no_page_is_left(url, engine):
  complete_body = {"prompt": "The river", "max_tokens": 4}
  httpx.post(f"{url}/v1/completions", json=complete_body)
  assert engine.live == 0
  assert engine._scheduler.pool.usage == 0
