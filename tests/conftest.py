"""Settings of every test."""

import os
from pathlib import Path

# Before JAX is imported: an accelerator is used where it was asked for.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jaxtyping
import pytest

# Annotated shapes, dtypes and types are checked at each call, so from before
# the first import of a module.
jaxtyping.install_import_hook("autoematic_jax", "runtime_typing.check")

# A first example compiles, which no deadline can allow for.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def data_dir() -> Path:
  """Golden values and small files that the tests read."""
  return Path(__file__).resolve().parent / "data"
