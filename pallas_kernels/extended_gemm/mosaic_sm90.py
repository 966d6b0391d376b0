"""The GEMM on a Hopper GPU, from weights in fragment order.

Few rows run the decode kernels of `sm90`. More rows than those take run as a
dot of float16 by XLA over the layer decoded to float16: exact as well, but it
writes and reads the whole matrix once, at 2 bytes a weight.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Mode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import permute_rows
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import choose_tile
from autoematic_jax.pallas_kernels.extended_gemm.unpack import unpack_layer


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
  as that stays on one side of `weight.max_rows`.

  Args:
    rows: Quantized activations.
    weight: Stacked weights in fragment order.
    layer: Which of them.
    present: Levels that may occur in `rows.levels`. Where it names one level,
      no offsets are read in vain, and nothing is multiplied twice.

  Returns:
    `[M, N]` float32.
  """
  # Exact: see the test over every element, offset and scale.
  x = rows.scaled(rows.values + rows.delta).astype(jnp.float16)
  if x.shape[0] > weight.max_rows:
    out = decode_and_dot(x, weight, layer, rows.levels, present)
    out = out * rows.tensor_scale
  else:
    # Imports Mosaic, which a CPU does without.
    from autoematic_jax.pallas_kernels.extended_gemm.sm90 import launch

    mode = _mode(present)
    out = launch.decode_gemm(
      x,
      weight,
      rows.tensor_scale[:, 0],
      rows.levels,
      layer.reshape(1),
      tile=choose_tile(weight, x.shape[0], mode),
      mode=mode,
    )
  return out * weight.tensor_scale[layer]


def decode_and_dot(
  x: Float[Array, "M K"],
  weight: FragmentWeight,
  layer: Int[Array, ""],
  levels: Int[Array, "M"],
  present: Sequence[int],
) -> Float[Array, "M N"]:
  """The product by XLA, for any number of rows and any device.

  The weight is decoded once for each level that may occur; a level that no row
  has costs nothing. Lacks the tensor scales of rows and weight.
  """
  x = permute_rows(x, weight.sources, layer.reshape(1))
  shape = (x.shape[0], weight.rows)

  def product(level):
    w = unpack_layer(weight, layer, level)
    # By default, float16 is multiplied exactly and added in float32.
    return jnp.dot(x, w.T, preferred_element_type=jnp.float32)

  if len(present) == 1:
    return product(present[0])
  out = jnp.zeros(shape, jnp.float32)
  for level in present:
    own = levels == level
    dot = lax.cond(
      jnp.any(own),
      partial(product, level),
      lambda: jnp.zeros(shape, jnp.float32),
    )
    out = jnp.where(own[:, None], dot, out)
  return out


def _mode(present) -> Mode:
  if len(set(present)) > 1:
    return "mixed"
  return "4" if present[0] == 4 else "6"
