"""The GEMM on a Hopper GPU, from weights in fragment order.

Few rows run the decode kernels of `sm90`, in turns where they are a few more
than those take. For many rows the layer is decoded to float16 in device memory
and multiplied by XLA: it is written and read once, at 2 bytes a weight.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Mode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import choose_tile


def check_device() -> None:
  """Refuses a default device that is no Hopper GPU.

  Raises:
    PrecisionError: Names the device and what to use there.
  """
  # An option that jax registers at run time.
  device = getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
  capability = getattr(device, "compute_capability", None)
  if capability != "9.0":
    raise PrecisionError(
      "'mosaic_sm90' needs a Hopper GPU (compute capability 9.0); the default"
      f" device is {device} ({getattr(device, 'device_kind', 'unknown')},"
      f" compute capability {capability}). Use 'xla' with"
      " expand([qtensor]) there, or 'reference' with the qtensor"
    )


def extended_gemm(
  rows: QuantizedRows,
  weight: FragmentWeight,
  layer: Int[Array, ""],
  *,
  present: Sequence[int],
) -> Float[Array, "M N"]:
  """Rows at mixed levels against one layer of a stacked weight.

  A row's bits do not change with its neighbours nor with their number, as long
  as they are few enough for the decode kernels.

  Args:
    rows: Quantized activations.
    weight: Stacked weights in fragment order.
    layer: Which of them.
    present: Levels that may occur in `rows.levels`. Where it names one level,
      no offsets are read in vain, and nothing is multiplied twice.

  Returns:
    `[M, N]` float32.
  """
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.extended_gemm.sm90 import launch

  # Exact: see the test over every element, offset and scale.
  x = rows.scaled(rows.values + rows.delta).astype(jnp.float16)
  mode = _mode(present)
  if x.shape[0] > weight.max_rows * _TURNS[mode]:
    return launch.many_rows_gemm(
      x, weight, rows.tensor_scale, rows.levels, layer, mode=mode
    )
  out = []
  for first in range(0, x.shape[0], weight.max_rows):
    some = slice(first, first + weight.max_rows)
    out.append(
      launch.decode_gemm(
        x[some],
        weight,
        rows.tensor_scale[some, 0],
        rows.levels[some],
        layer.reshape(1),
        tile=choose_tile(weight, x[some].shape[0], mode),
        mode=mode,
      )
    )
  return jnp.concatenate(out)


_TURNS = {"4": 8, "6": 4, "mixed": 2}
"""How often a decode kernel may run, for rows beyond those it takes, before it
is faster to decode the layer once and multiply all rows."""


def _mode(present) -> Mode:
  if len(set(present)) > 1:
    return "mixed"
  return "4" if present[0] == 4 else "6"
