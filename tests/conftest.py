"""Settings of every test."""

import os
from pathlib import Path

# Before JAX is imported: an accelerator is used where it was asked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import jaxtyping
import pytest
import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

# Annotated shapes, dtypes and types are checked at each call, so from before
# the first import of a module.
jaxtyping.install_import_hook("autoematic_jax", "runtime_typing.check")

# A first example compiles, which no deadline can allow for.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_code():
  """Frees what a module compiled, when it is done.

  Each compiled function holds several mappings of memory. A process that ran
  the whole suite came to Linux' limit of 65530, where the next compilation
  crashes it.
  """
  yield
  jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> Path:
  """Golden values and small files that the tests read."""
  return Path(__file__).resolve().parent / "data"


_CORPUS = [
  "The capital of France is Paris, and 1234567 people don't live there.",
  "def f(x):\n\treturn x  # naïve café, 日本語, Ελληνικά, 🙂🙃",
]


@pytest.fixture(scope="session")
def trained_bpe() -> tokenizers.Tokenizer:
  """A byte-level BPE of 320 tokens, the first three of them special."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = trainers.BpeTrainer(
    vocab_size=320,
    min_frequency=1,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    show_progress=False,
  )
  tokenizer.train_from_iterator(_CORPUS * 3, trainer)
  assert tokenizer.get_vocab_size() == 320
  return tokenizer


@pytest.fixture
def compiled(caplog):
  """Runs a function and says what JAX compiled for it."""

  def call(function):
    caplog.clear()
    with jax.log_compiles():
      function()
    return [
      record.getMessage()
      for record in caplog.records
      if record.getMessage().startswith("Compiling")
    ]

  return call


@pytest.fixture(scope="session")
def hopper():
  """Skips a test where the Hopper kernels do not run, saying why."""
  from autoematic_jax.errors import PrecisionError
  from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90

  try:
    mosaic_sm90.check_device()
  except PrecisionError as error:
    pytest.skip(str(error))
