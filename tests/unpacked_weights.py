"""Weights in fragment order, decoded by XLA for many rows of x."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import formats
from autoematic_jax.pallas_kernels.extended_gemm.fragments import COLUMNS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import GROUPS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import MAGNITUDE_BITS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import ROWS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import SIGN_BITS
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight


@partial(jax.jit, static_argnames="level")
def unpack_layer(
  weight: FragmentWeight, layer: Int[Array, ""], level: int
) -> Float[Array, "N C"]:
  """One layer at one level, columns in the order of `weight.sources`.

  Args:
    weight: Stacked layers.
    layer: Which of them.
    level: 4, or 6 to add the offsets.

  Returns:
    `[N, C]` float16, without the tensor scale; exact, zeros past K.
  """
  units = lax.dynamic_index_in_dim(weight.units, layer, 0, keepdims=False)
  # tiles, steps, words
  units = units.swapaxes(1, 2).reshape(-1, units.shape[1], units.shape[3])
  values = _values(units[..., :128])
  if level >= 6 and weight.offsets is not None:
    offsets = lax.dynamic_index_in_dim(weight.offsets, layer, 0, keepdims=False)
    d = _offsets(weight, offsets, values.shape)
    values = values + formats.offset_delta(d, values, weight.decoding)
  values = values.reshape(-1, units.shape[1] * COLUMNS)
  scale = jnp.repeat(_scales(units[..., 128:]), formats.GROUP, axis=-1)
  return (values * scale)[: weight.rows].astype(jnp.float16)


def _values(words):
  """`[tiles, half, 8, steps, group, word, 4]` E2M1 values."""
  tiles, steps = words.shape[:2]
  words = words.reshape(tiles, steps, 8, GROUPS, 4)
  codes = []
  for n in range(4):
    for b in range(2):
      magnitude = (words >> (MAGNITUDE_BITS[n] + 16 * b)) & 7
      sign = (words >> (SIGN_BITS[n] + 16 * b)) & 1
      codes.append(magnitude | (sign << 3))
  values = formats.decode_e2m1(jnp.stack(codes, -1).astype(jnp.uint8))
  # n = 2 * pair + half, then b.
  values = values.reshape(*words.shape, 2, 2, 2)
  values = values.transpose(0, 6, 2, 1, 3, 4, 5, 7)
  return values.reshape(*values.shape[:-2], 4)


def _scales(words):
  """`[N padded, groups]` float32."""
  tiles, steps = words.shape[:2]
  scale = lax.bitcast_convert_type(words, jnp.uint8)
  scale = scale.reshape(tiles, steps, 8, GROUPS, 2).transpose(0, 4, 2, 1, 3)
  scale = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)
  return formats.decode_e4m3(scale).reshape(tiles * ROWS, steps * GROUPS)


def _offsets(weight, offsets, shape):
  """Offsets d, in the shape of `_values`."""
  tiles, half, rows, steps, groups, _, _ = shape
  per_slice = steps // weight.slices
  raw = lax.bitcast_convert_type(offsets, jnp.uint8)
  raw = raw.reshape(offsets.shape[0], weight.slices, -1)
  out = []
  begin = 0
  for count, words in ((weight.doubles, 2), (weight.singles, 1)):
    if not count:
      continue
    size = count * weight.tiles * 64 * words
    part = raw[:, :, begin : begin + size]
    begin += size
    part = part.reshape(
      -1, weight.slices, count, weight.tiles, rows, groups, words, 2
    )
    # blocks tiles, slices steps, r, group, word, b
    part = part.transpose(0, 3, 1, 2, 4, 5, 6, 7)
    part = part.reshape(tiles, weight.slices, count, rows, groups, words, 2)
    fields = jnp.stack([(part >> (6 - 2 * n)) & 3 for n in range(4)], axis=-2)
    # Of n = 2 * pair + half.
    fields = fields.reshape(*part.shape[:-1], 2, 2, 2)
    fields = fields.transpose(0, 7, 3, 1, 2, 4, 5, 6, 8)
    fields = fields.reshape(*fields.shape[:-2], 4).astype(jnp.int32)
    missing = [(0, 0)] * fields.ndim
    missing[6] = (0, 4 - words)
    out.append(jnp.pad(fields - 2, missing))
  plain = per_slice - weight.doubles - weight.singles
  unrefined = (tiles, half, rows, weight.slices, plain, groups, 4, 4)
  out.append(jnp.zeros(unrefined, jnp.int32))
  return jnp.concatenate(out, axis=4).reshape(shape)
