"""Runtime-adaptive mixed-precision LLM inference on JAX (AutoEMatic).

model = autoematic_jax.load("smollm2-autofp6")
result = autoematic_jax.generate(model, "What is JAX?", chat=True)
print(result.text, result.trace.shape)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from autoematic_jax.generation import generate
  from autoematic_jax.generation import stream
  from autoematic_jax.language_model import LanguageModel
  from autoematic_jax.language_model import load
  from autoematic_jax.policy import PolicyConfig
  from autoematic_jax.results import GenerationResult
  from autoematic_jax.results import TextChunk
  from autoematic_jax.sampling import SamplingConfig

__version__ = "0.1.0"

__all__ = [
  "GenerationResult",
  "LanguageModel",
  "PolicyConfig",
  "SamplingConfig",
  "TextChunk",
  "generate",
  "load",
  "stream",
]

_HOMES = {
  "GenerationResult": "results",
  "LanguageModel": "language_model",
  "PolicyConfig": "policy",
  "SamplingConfig": "sampling",
  "TextChunk": "results",
  "generate": "generation",
  "load": "language_model",
  "stream": "generation",
}


def __getattr__(name: str) -> object:
  # Lazy, so that `autoematic_jax.formats` does not import the whole project.
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
  return getattr(module, name)
