"""The GEMM in plain XLA operations, for CPUs, from expanded weights.

The dot always runs in row tiles of one fixed shape: a matrix library picks its
summation order by shape, so this is what makes a row's bits independent of how
many rows stand beside it.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from autoematic_jax import formats
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.extended_gemm.expanded import ExpandedWeight


def tiled_dot(
  x: Float[Array, "M K"], w: Float[Array, "K N"], row_tile: int
) -> Float[Array, "M N"]:
  """`x @ w` in tiles of `row_tile` rows, the last one zero-padded."""
  rows, columns = x.shape
  tiles = -(-rows // row_tile)
  x = jnp.pad(x, ((0, tiles * row_tile - rows), (0, 0)))
  if tiles == 1:
    return _dot(x, w)[:rows]
  x = x.reshape(tiles, row_tile, columns)
  return lax.map(lambda tile: _dot(tile, w), x).reshape(-1, w.shape[1])[:rows]


def _dot(x, w):
  return jnp.dot(x, w, precision=lax.Precision.HIGHEST)


def extended_gemm(
  rows: QuantizedRows,
  weight: ExpandedWeight,
  *,
  present: Sequence[int],
  row_tile: int,
) -> Float[Array, "M N"]:
  """Rows at mixed levels against one weight.

  The base product, the product of the refined columns and the 2-bit product
  are separate dots, each skipped when no row needs it; adding an exact zero
  leaves the other rows' bits alone.

  Args:
    rows: Quantized activations.
    weight: Expanded weight of the same width.
    present: Levels that may occur in `rows.levels`; the others are not
      compiled.
    row_tile: Rows a dot.

  Returns:
    `[M, N]` float32.
  """
  levels = rows.levels
  x = rows.scaled(rows.values + rows.delta)
  out = jnp.zeros((x.shape[0], weight.outputs), jnp.float32)
  if any(level > 2 for level in present):
    out = _when(
      levels > 2,
      len(present) > 1,
      lambda out: tiled_dot(x, _base_weight(weight), row_tile),
      out,
    )
  for level, refinement in (
    (6, weight.refinement6),
    (8, weight.refinement8),
  ):
    if level in present and refinement is not None:
      out = _when(
        levels == level,
        len(present) > 1,
        lambda out, level=level, refinement=refinement: (
          out + _refined_product(rows, x, weight, refinement, level, row_tile)
        ),
        out,
      )
  if 2 in present:
    out = _when(
      levels == 2,
      len(present) > 1,
      lambda out: jnp.where(
        (levels == 2)[:, None],
        tiled_dot(x, _two_bit_weight(weight), row_tile),
        out,
      ),
      out,
    )
  return out * rows.tensor_scale * weight.tensor_scale


def _when(wanted, conditional, compute, out):
  """`compute(out)` if any row wants it, else `out`."""
  if not conditional:
    return compute(out)
  return lax.cond(jnp.any(wanted), compute, lambda out: out, out)


def _base_weight(weight):
  return _scaled_codes(weight, weight.codes.astype(jnp.float32))


def _two_bit_weight(weight):
  """`2 * digit` in units of the codes (numerics of AutoFP2, c = 2)."""
  codes = weight.codes.astype(jnp.float32)
  digit = formats.autofp2_digit(codes / weight.code_unit)
  return _scaled_codes(weight, digit * (2.0 * weight.code_unit))


def _scaled_codes(weight, codes):
  inputs, outputs = codes.shape
  grouped = codes.reshape(inputs // formats.GROUP, formats.GROUP, outputs)
  return (grouped * weight.group_scale[:, None]).reshape(inputs, outputs)


def _refined_product(rows, x, weight, refinement, level, row_tile):
  x = jnp.where((rows.levels == level)[:, None], x, 0.0)
  x = jnp.take(x, weight.columns, axis=1)
  return tiled_dot(x, refinement.astype(jnp.float32), row_tile)
