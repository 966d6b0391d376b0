"""An engine without a model, and a server in a thread.

The fake model answers token after token, counting up from the last token of
the prompt; token 99 ends an answer. Its text is the number and a space.
"""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np

from autoematic_jax.errors import PromptError
from autoematic_jax.policy import PolicyConfig
from autoematic_jax.serving.app import Api
from autoematic_jax.serving.config import ServeConfig
from autoematic_jax.serving.engine import Engine
from autoematic_jax.serving.server import Server
from autoematic_jax.tokenizer import StreamDecoder

LAYERS, VOCAB, EOS = 2, 100, 99


class FakeTokenizer:
  """Numbers separated by spaces."""

  def encode(self, text, *, add_special_tokens=True):
    try:
      return [int(word) % VOCAB for word in text.split()]
    except ValueError as error:
      raise PromptError("the prompt is not of numbers") from error

  def encode_chat(self, messages):
    if messages[0]["role"] == "system":
      raise PromptError("the chat template failed: no system role")
    return [token for m in messages for token in self.encode(m["content"])]

  def decode(self, ids):
    return "".join(f"{token} " for token in ids)

  def stream_decoder(self):
    return StreamDecoder(self.decode)


class FakeRunner:
  """Counts up.

  Attributes:
    gate: Decode steps wait until it is set.
    failure: Raised by the next decode step.
    stepped: Set by each decode step that begins.
    batches: Sizes of the decode batches.
  """

  has_base_pages = False
  first_decode_state = np.zeros((8,), np.float32)

  def __init__(self):
    self.gate = threading.Event()
    self.gate.set()
    self.failure = None
    self.stepped = threading.Event()
    self.batches = []

  def compile_all(self):
    yield 1, 1

  def prefill(self, sequence, tokens):
    return self._result([sequence.prompt[sequence.done + tokens - 1]])

  def decode(self, sequences):
    self.stepped.set()
    self.gate.wait()
    if self.failure is not None:
      raise self.failure
    self.batches.append(len(sequences))
    return self._result([s.generated[-1] for s in sequences])

  def _result(self, last):
    rows = len(last)
    best = [(token + 1) % VOCAB for token in last]
    logits = np.full((rows, VOCAB), -5.0, np.float32)
    logits[np.arange(rows), best] = 5.0
    return SimpleNamespace(
      best=np.asarray(best),
      logits=logits,
      entropy=np.zeros(rows),
      policy=np.zeros((8, rows), np.float32),
      bits=np.full((LAYERS, rows), 6),
      refined=np.ones((LAYERS, rows), bool),
    )

  def copy_out(self, table):
    return []

  def copy_in(self, table, contents):
    pass


def fake_model():
  return SimpleNamespace(
    config=SimpleNamespace(num_layers=LAYERS, vocab_size=VOCAB),
    tokenizer=FakeTokenizer(),
    eos_ids=(EOS,),
    policy=PolicyConfig(),
    precisions=(6,),
    levels=(6,),
    format="fake",
  )


class FakeEngine(Engine):
  """An engine over a FakeRunner, which is its `runner`."""

  def __init__(self, **limits):
    self.runner = FakeRunner()
    limits = {"max_tokens": 256, **limits}
    super().__init__(fake_model(), ServeConfig(**limits), self.runner)

  def precision(self, precision):
    return np.full((LAYERS,), 6, np.int32)


@contextlib.contextmanager
def serving(engine, name="fake"):
  """Address of a server in a thread; `engine` is started and stopped."""
  for _ in engine.start():
    pass
  url, bound = [], threading.Event()

  def announce(address):
    url.append(address)
    bound.set()

  server = Server(
    Api(engine, name), host="127.0.0.1", port=0, announce=announce
  )
  thread = threading.Thread(target=server.run)
  thread.start()
  assert bound.wait(30)
  try:
    yield url[0]
  finally:
    server.should_exit = True
    thread.join()
