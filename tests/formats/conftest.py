import json

import jax
import pytest


@pytest.fixture(scope="session")
def golden(data_dir):
  return json.loads((data_dir / "numerics.json").read_text())


@pytest.fixture(params=["jitted", "eager"])
def run(request):
  """Calls a function in one compiled program, or one operation at a time.

  A compiler that drops or reorders a rounding shows in the difference.
  """

  def call(function, *args):
    if request.param == "jitted":
      return jax.jit(function)(*args)
    with jax.disable_jit():
      return function(*args)

  return call
