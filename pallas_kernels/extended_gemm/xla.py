"""The GEMM in plain XLA operations, for CPUs, from expanded weights.

A matrix library picks its order of summation by shape, so a row's bits must
not depend on how many rows there are: dots run in tiles of a fixed number of
rows. Tiles of one row are special: XLA fuses the decoding of the weights into
a product with one vector, which reads a byte a weight and writes nothing
(4.3 ms for 30 layers of 3072 x 576 on two AVX2 cores, against 34 ms in tiles of
4 rows). It does so only where nothing else is near to fuse, hence a conditional
around each product.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from autoematic_jax import formats
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.extended_gemm.expanded import ExpandedWeight
from autoematic_jax.pallas_kernels.extended_gemm.expanded import at_layer
from autoematic_jax.pallas_kernels.extended_gemm.matvec import matvec

Decode = Callable[[ExpandedWeight], Float[Array, "N K"]]


def tiled_dot(
  x: Float[Array, "M K"],
  wanted: Bool[Array, "M"],
  stacked: ExpandedWeight,
  layer: Int[Array, ""],
  decode: Decode,
  row_tile: int,
) -> Float[Array, "M N"]:
  """`x @ decode(weight).T` in tiles of `row_tile` rows.

  Args:
    x: Scaled activations.
    wanted: Rows whose product is needed; a tile without any is zero.
    stacked: Weights with a leading layer axis.
    layer: Which of them.
    decode: Makes a float32 matrix of one layer's weight.
    row_tile: Rows a dot; the last tile is zero-padded.

  Returns:
    `[M, N]` float32.
  """
  rows, columns = x.shape
  tiles = -(-rows // row_tile)
  padding = tiles * row_tile - rows
  x = jnp.pad(x, ((0, padding), (0, 0))).reshape(tiles, row_tile, columns)
  wanted = jnp.pad(wanted, (0, padding)).reshape(tiles, row_tile)

  def weight():
    return decode(at_layer(stacked, layer))

  def each_tile(dot):
    none = jnp.zeros((row_tile, stacked.outputs), jnp.float32)
    return lax.map(
      lambda tile: lax.cond(jnp.any(tile[1]), dot, lambda _: none, tile[0]),
      (x, wanted),
    )

  def decode_once():
    w = weight()
    return each_tile(
      lambda tile: jnp.dot(tile, w.T, precision=lax.Precision.HIGHEST)
    )

  if row_tile == 1:
    out = each_tile(lambda tile: matvec(weight(), tile[0])[None])
  else:
    none = jnp.zeros((tiles, row_tile, stacked.outputs), jnp.float32)
    out = lax.cond(jnp.any(wanted), decode_once, lambda: none)
  return out.reshape(-1, stacked.outputs)[:rows]


def extended_gemm(
  rows: QuantizedRows,
  stacked: ExpandedWeight,
  layer: Int[Array, ""],
  *,
  present: Sequence[int],
  row_tile: int,
) -> Float[Array, "M N"]:
  """Rows at mixed levels against one weight.

  The base product, the product of the refined columns and the 2-bit product
  are separate dots, each skipped where no row needs it; adding an exact zero
  leaves the other rows' bits alone.

  Args:
    rows: Quantized activations.
    stacked: Expanded weights of the same width, stacked by layer.
    layer: Which of them.
    present: Levels that may occur in `rows.levels`; the others are not
      compiled.
    row_tile: Rows a dot.

  Returns:
    `[M, N]` float32.
  """
  levels = rows.levels
  x = rows.scaled(rows.values + rows.delta)

  def product(x, wanted, decode):
    return tiled_dot(x, wanted, stacked, layer, decode, row_tile)

  out = jnp.zeros((x.shape[0], stacked.outputs), jnp.float32)
  if any(level > 2 for level in present):
    out = product(x, levels > 2, _base_weight)
  for level in (6, 8):
    if level in present and stacked.refinement(level) is not None:
      own = levels == level
      refined = jnp.where(own[:, None], x, 0.0)
      refined = jnp.take(refined, stacked.columns[layer], axis=1)
      out = out + product(refined, own, partial(_refinement, level))
  if 2 in present:
    own = levels == 2
    out = jnp.where(own[:, None], product(x, own, _two_bit_weight), out)
  return out * rows.tensor_scale * stacked.tensor_scale[layer]


def _base_weight(weight):
  return _scaled_codes(weight, weight.codes.astype(jnp.float32))


def _two_bit_weight(weight):
  """`2 * digit` in units of the codes (numerics of AutoFP2, c = 2)."""
  codes = weight.codes.astype(jnp.float32)
  digit = formats.autofp2_digit(codes / weight.code_unit)
  return _scaled_codes(weight, digit * (2.0 * weight.code_unit))


def _scaled_codes(weight, codes):
  grouped = codes.reshape(*weight.group_scale.shape, formats.GROUP)
  return (grouped * weight.group_scale[..., None]).reshape(codes.shape)


def _refinement(level, weight):
  return weight.refinement(level).astype(jnp.float32)
