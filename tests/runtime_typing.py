"""The checker of annotations that the tests run the package under."""

from collections.abc import Callable

import beartype


def check(function: Callable) -> Callable:
  """Checks a function's annotated arguments and result at each call.

  Constructors are left alone: JAX rebuilds a registered dataclass with
  whatever takes the place of its arrays, such as shapes, axes or None.
  """
  if function.__name__ == "__init__":
    return function
  return beartype.beartype(function)
