"""Attention over packed keys and values, for Hopper GPUs."""

from autoematic_jax.pallas_kernels.attention.decode import HEAD_WIDTHS
from autoematic_jax.pallas_kernels.attention.decode import attend
from autoematic_jax.pallas_kernels.attention.decode import step
from autoematic_jax.pallas_kernels.attention.decode import takes
from autoematic_jax.pallas_kernels.attention.heads import HeadNorms

__all__ = ["HEAD_WIDTHS", "HeadNorms", "attend", "step", "takes"]
