"""What the engine promises whatever the model is: nothing is lost or leaks."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from serving_fakes import EOS
from serving_fakes import FakeEngine
from serving_fakes import serving

from autoematic_jax.serving.app import Api
from autoematic_jax.serving.sequences import SamplingParams


class Collector:
  """Outputs of one sequence."""

  def __init__(self):
    self.outputs = []
    self.ended = threading.Event()

  def __call__(self, output):
    self.outputs.append(output)
    if output.finish_reason is not None:
      self.ended.set()

  @property
  def tokens(self):
    return [t for output in self.outputs for t in output.tokens]

  @property
  def reason(self):
    return self.outputs[-1].finish_reason


@pytest.fixture
def started():
  """Starts engines and stops them, after which no page may be in use."""
  engines = []

  def start(**limits):
    engine = FakeEngine(**limits)
    for _ in engine.start():
      pass
    engines.append(engine)
    return engine

  yield start
  for engine in engines:
    engine.runner.gate.set()
    engine.stop()
    assert engine.live == 0
    assert engine._scheduler.pool.usage == 0


def submit(engine, prompt, **params):
  collector = Collector()
  params = SamplingParams(**{"max_new_tokens": 10, **params})
  sequence = engine.submit(prompt, params, engine.precision(None), collector)
  return sequence, collector


def test_each_of_many_requests_gets_its_own_answer(started):
  engine = started(max_running=4)
  answers = [
    submit(engine, [n] * (n + 1), max_new_tokens=20) for n in range(60)
  ]
  for n, (_, answer) in enumerate(answers):
    assert answer.ended.wait(30)
    assert answer.tokens == list(range(n + 1, n + 21))
    assert [o.finish_reason for o in answer.outputs].count("length") == 1
  assert max(engine.runner.batches) == 4


def test_end_token_ends_unless_ignored(started):
  engine = started()
  _, stopped = submit(engine, [96])
  _, ignored = submit(engine, [96], max_new_tokens=4, ignore_eos=True)
  assert stopped.ended.wait(30)
  assert ignored.ended.wait(30)
  assert (stopped.tokens, stopped.reason) == ([97, 98, EOS], "stop")
  assert (ignored.tokens, ignored.reason) == ([97, 98, 99, 0], "length")


def test_stop_string_on_the_last_allowed_token_is_a_stop(started):
  _, answer = submit(started(), [1], max_new_tokens=3, stop=("4",))
  assert answer.ended.wait(30)
  assert answer.reason == "stop"
  assert "".join(o.text for o in answer.outputs) == "2 3 "


def test_pages_that_run_out_preempt_and_lose_nothing(started):
  engine = started(max_running=4, pages=8, prefix_cache=False)
  answers = [submit(engine, [n] * 40, max_new_tokens=90) for n in range(4)]
  for n, (_, answer) in enumerate(answers):
    assert answer.ended.wait(30)
    assert answer.tokens == [(n + 1 + i) % 100 for i in range(90)]
  assert engine._scheduler.preemptions > 0


def test_a_request_that_outgrows_all_pages_ends(started):
  _, answer = submit(
    started(pages=4, prefix_cache=False),
    [0] * 120,
    max_new_tokens=90,
    ignore_eos=True,
  )
  assert answer.ended.wait(30)
  assert answer.reason == "length"
  # 128 tokens are stored, and one more was drawn from them.
  assert len(answer.tokens) == 9


def test_abandoned_requests_free_everything(started):
  engine = started(max_running=4)
  engine.runner.gate.clear()
  answers = [
    submit(engine, [n % 50] * 200, ignore_eos=True) for n in range(200)
  ]
  assert engine.runner.stepped.wait(30)
  for sequence, _ in answers:
    engine.abort(sequence)
  engine.runner.gate.set()
  _, last = submit(engine, [5])
  assert last.ended.wait(5)
  assert last.tokens == list(range(6, 16))
  for _, answer in answers:
    assert answer.ended.wait(30)
    assert answer.reason == "abort"


def test_engine_that_dies_tells_everybody(started):
  engine = FakeEngine()
  engine.runner.gate.clear()
  seen = []
  threading.excepthook, kept = (
    (lambda args: seen.append(args)),
    (threading.excepthook),
  )
  try:
    with serving(engine) as url, httpx.Client(base_url=url) as client:
      assert client.get("/health").status_code == 200
      with client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "1 2", "stream": True, "temperature": 0},
      ) as stream:
        assert stream.status_code == 200
        engine.runner.failure = RuntimeError("the device is gone")
        engine.runner.gate.set()
        frames = [line for line in stream.iter_lines() if line]
      assert json.loads(frames[-2][6:])["error"]["code"] == 500
      assert frames[-1] == "data: [DONE]"
      assert client.get("/health").status_code == 503
      refused = client.post("/v1/completions", json={"prompt": "1"})
      assert refused.status_code == 503
  finally:
    threading.excepthook = kept
  assert [args.exc_type for args in seen] == [RuntimeError]


def test_full_queue_is_refused_before_the_prompt_is_read(started):
  engine = started(max_running=1, max_waiting=1)
  engine.runner.gate.clear()
  submit(engine, [1])
  assert engine.runner.stepped.wait(30)
  submit(engine, [2])
  transport = httpx.ASGITransport(Api(engine, "fake").app())

  async def post():
    async with httpx.AsyncClient(
      transport=transport, base_url="http://test"
    ) as client:
      # The tokenizer would refuse this.
      return await client.post("/v1/completions", json={"prompt": "none"})

  refused = asyncio.run(post())
  assert refused.status_code == 429
  assert refused.headers["retry-after"] == "1"
  assert refused.json()["error"]["type"] == "rate_limit_error"


SERVER = """
from serving_fakes import FakeEngine
from autoematic_jax.serving.app import Api
from autoematic_jax.serving.server import Server
engine = FakeEngine(drain_seconds=30)
list(engine.start())
engine.runner.gate.clear()
Server(Api(engine, "fake"), host="127.0.0.1", port=0,
       announce=lambda url: print(url, flush=True)).run()
"""


def test_sigterm_lets_running_requests_finish():
  environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
  # The step waits at the gate until the signal opens it.
  program = SERVER.replace(
    "engine.runner.gate.clear()",
    "engine.runner.gate.clear()\n"
    "def drain(self, then=Server.drain):\n"
    "  then(self)\n"
    "  engine.runner.gate.set()\n"
    "Server.drain = drain",
  )
  with subprocess.Popen(
    [sys.executable, "-c", program],
    stdout=subprocess.PIPE,
    text=True,
    env=environment,
  ) as process:
    url = process.stdout.readline().strip()
    with (
      httpx.Client(base_url=url, timeout=60) as client,
      client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "1", "stream": True, "temperature": 0},
      ) as stream,
    ):
      lines = stream.iter_lines()
      assert '"text": "2 "' in next(lines)
      process.send_signal(signal.SIGTERM)
      rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason": "length"' in rest[-2]
    assert process.wait(60) == 0
