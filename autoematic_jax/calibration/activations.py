"""What the refinement of activations is worth on a calibration text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from autoematic_jax import formats
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows


@jax.jit(static_argnames="decoding")
def refinement_gain(
  x: Float[Array, "M K"], decoding: formats.Decoding
) -> Float[Array, "K"]:
  """Squared error that refining each column removes, summed over rows.

  Args:
    x: Inputs of a projection.
    decoding: Step of the offsets.
  """
  rows = quantize_rows(
    x,
    jnp.full((x.shape[0],), 6, jnp.int32),
    config=ActivationConfig(threshold=0.0, decoding=decoding),
    present=(6,),
  )

  def error(values):
    quantized = rows.scaled(values) * rows.tensor_scale
    return jnp.square(x - quantized[:, : x.shape[1]])

  base, refined = error(rows.values), error(rows.values + rows.delta)
  return jnp.sum(base - refined, axis=0)
