"""Runtime-adaptive mixed-precision LLM inference on JAX (AutoEMatic)."""

__version__ = "0.1.0"
