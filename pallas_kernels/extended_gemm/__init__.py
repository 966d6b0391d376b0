"""Mixed-precision GEMM over AutoFP weights."""

from autoematic_jax.pallas_kernels.extended_gemm.api import DECODE_ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm.api import PREFILL_ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm.api import extended_gemm
from autoematic_jax.pallas_kernels.extended_gemm.before import Before
from autoematic_jax.pallas_kernels.extended_gemm.before import Gate
from autoematic_jax.pallas_kernels.extended_gemm.before import Norm
from autoematic_jax.pallas_kernels.extended_gemm.before import rms_norm
from autoematic_jax.pallas_kernels.extended_gemm.block_scaled import (
  BlockScaledWeight,
)
from autoematic_jax.pallas_kernels.extended_gemm.expanded import RAGGED_FIELDS
from autoematic_jax.pallas_kernels.extended_gemm.expanded import ExpandedWeight
from autoematic_jax.pallas_kernels.extended_gemm.expanded import at_layer
from autoematic_jax.pallas_kernels.extended_gemm.expanded import expand
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.matvec import matvec
from autoematic_jax.pallas_kernels.extended_gemm.prepack import prepack
from autoematic_jax.pallas_kernels.extended_gemm.sm100.pack import (
  pack_block_scaled,
)
from autoematic_jax.pallas_kernels.extended_gemm.stacks import (
  FORMATS as KERNEL_FORMATS,
)

__all__ = [
  "DECODE_ROW_TILE",
  "KERNEL_FORMATS",
  "PREFILL_ROW_TILE",
  "RAGGED_FIELDS",
  "Before",
  "BlockScaledWeight",
  "ExpandedWeight",
  "FragmentWeight",
  "Gate",
  "Norm",
  "at_layer",
  "expand",
  "extended_gemm",
  "matvec",
  "pack_block_scaled",
  "prepack",
  "rms_norm",
]
