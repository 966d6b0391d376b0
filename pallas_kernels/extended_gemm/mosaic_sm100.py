"""The GEMM in the paper's form, `[Wq | Wqr] . [Aq | Aqr]`, for Blackwell GPUs.

Nobody has run it yet: it compiles for such a GPU, and its kernel's body gives
the right numbers where numpy takes the place of copies and tensor cores.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.extended_gemm import device
from autoematic_jax.pallas_kernels.extended_gemm.block_scaled import (
  BlockScaledWeight,
)


def check_device() -> None:
  """Refuses a default device that is no data-center Blackwell GPU.

  Raises:
    PrecisionError: Names the device and what to use there.
  """
  device.check_device("mosaic_sm100", "10.0", "Blackwell")


def multiply(
  rows: QuantizedRows,
  weight: BlockScaledWeight,
  layer: Int[Array, ""],
  *,
  present: Sequence[int],
) -> Float[Array, "M N"]:
  """Rows at mixed levels against one layer of a stack.

  A row is refined in the second pass over the columns, where its neighbours at
  4 bits have zeros.

  Args:
    rows: Quantized activations, refined only where the weights are not.
    weight: Stacked weights.
    layer: Which of them.
    present: Levels that may occur in `rows.levels`.

  Returns:
    `[M, N]` float32.
  """
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.extended_gemm.sm100 import kernel
  from autoematic_jax.pallas_kernels.extended_gemm.sm100 import operands
  from autoematic_jax.pallas_kernels.extended_gemm.sm100.plan import plan_of

  count = rows.values.shape[0]
  plan = plan_of(weight, count)
  cut = operands.row_operands(
    rows,
    weight.mask[layer],
    weight.order[layer],
    plan,
    refine=6 in present,
  )
  out = kernel.product(cut, weight, jnp.reshape(layer, (1,)), plan)
  return out[:count, : weight.rows]
