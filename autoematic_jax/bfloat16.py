"""bfloat16 arrays held as their bits.

XLA's CPU backend widens bfloat16 to float32 tens of times more slowly than
memory delivers it (60 ms against 3 ms for 28M values, jaxlib 0.10.2), even
behind a bitcast; a shift of uint16 bits it fuses and vectorizes. To update a
slice of a bfloat16 array it converts the whole array to float32 and back.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt16

Stored = Float[Array, "..."] | UInt16[Array, "..."]


def store(array: np.ndarray | Array, dtype: jnp.dtype | None = None) -> Stored:
  """Puts an array on the device, bfloat16 as bits.

  Args:
    array: Floating-point values.
    dtype: What to convert to; None keeps the array's own.
  """
  values = np.asarray(array)
  values = values if dtype is None else values.astype(dtype)
  if values.dtype == jnp.bfloat16:
    return jnp.asarray(values.view(np.uint16))
  return jnp.asarray(values)


def to_float32(stored: Stored) -> Float[Array, "..."]:
  """Values of a stored array."""
  if stored.dtype != jnp.uint16:
    return stored.astype(jnp.float32)
  return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)


def pack(x: Float[Array, "*S"]) -> UInt16[Array, "*S"]:
  """Bits of float32 values rounded to bfloat16; `to_float32` undoes it."""
  kept = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  bits = lax.bitcast_convert_type(kept, jnp.uint32) >> 16
  return bits.astype(jnp.uint16)


def rounded(x: Float[Array, "*S"], stored: Stored) -> Float[Array, "*S"]:
  """`x` in the precision of a stored array, as float32."""
  if stored.dtype != jnp.uint16:
    return x.astype(stored.dtype).astype(jnp.float32)
  return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
