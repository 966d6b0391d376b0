"""Attention over packed keys and values, for Hopper GPUs."""

from autoematic_jax.pallas_kernels.attention.decode import HEAD_WIDTHS
from autoematic_jax.pallas_kernels.attention.decode import attend
from autoematic_jax.pallas_kernels.attention.decode import takes

__all__ = ["HEAD_WIDTHS", "attend", "takes"]
