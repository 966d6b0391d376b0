"""Mixed-precision GEMM: shapes, dispatch and checks."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from autoematic_jax import formats
from autoematic_jax.errors import PrecisionError
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm100
from autoematic_jax.pallas_kernels.extended_gemm import reference
from autoematic_jax.pallas_kernels.extended_gemm import xla
from autoematic_jax.pallas_kernels.extended_gemm.before import Before
from autoematic_jax.pallas_kernels.extended_gemm.before import Gate
from autoematic_jax.pallas_kernels.extended_gemm.block_scaled import (
  BlockScaledWeight,
)
from autoematic_jax.pallas_kernels.extended_gemm.expanded import ExpandedWeight
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight

Implementation = Literal["reference", "xla", "mosaic_sm90", "mosaic_sm100"]

Weight = formats.QTensor | ExpandedWeight | FragmentWeight | BlockScaledWeight

_TAKES = {
  formats.QTensor: "reference",
  ExpandedWeight: "xla",
  FragmentWeight: "mosaic_sm90",
  BlockScaledWeight: "mosaic_sm100",
}

_ONE_SEGMENT = (formats.QTensor, BlockScaledWeight)
"""Forms that refine a column on one side only, as the paper's GEMM does."""

DECODE_ROW_TILE = 1
"""Fastest up to about 8 rows (two AVX2 cores); the work grows with the rows."""

PREFILL_ROW_TILE = 64
"""As fast as one dot over all rows; fewer waste less on a short prompt."""


def extended_gemm(
  x: Float[Array, "M K"],
  weight: Weight,
  levels: Int[Array | np.ndarray, "..."] | int,
  *,
  activation: ActivationConfig | None = None,
  present: Sequence[int] | None = None,
  layer: Int[Array, ""] | int | None = None,
  row_tile: int = PREFILL_ROW_TILE,
  before: Before = None,
  implementation: Implementation | None = None,
) -> Float[Array, "M N"]:
  """`x @ weight.T` with every row at its own precision.

  Args:
    x: Activations in full precision, quantized here row by row.
    weight: `reference` takes the packed QTensor, `xla` the ExpandedWeight
      that `expand` makes of it, `mosaic_sm90` (Hopper GPUs) the FragmentWeight
      that `prepack` makes of all layers, `mosaic_sm100` (Blackwell GPUs) the
      BlockScaledWeight that `pack_block_scaled` makes of them.
    levels: Bits of each row (2 runs as W2A4), or one level for all rows.
    activation: How x is refined; the default takes the weight's step, and
      keeps the masks apart where `reference` or `mosaic_sm100` runs, which
      need that.
    present: Levels that may occur, where the caller knows; None allows every
      level of the weight. A row at a level outside `present` is undefined.
    layer: Which layer of a weight that is stacked; one layer packed for a GPU
      needs none.
    row_tile: `xla` only: rows a dot. At one row tile, a row's bits are the
      same for any M.
    before: What is done to x first; `mosaic_sm90` makes one kernel of it and
      the quantization of a few rows.
    implementation: None chooses by the weight's form.

  Returns:
    `[M, N]` float32.

  Raises:
    PrecisionError: A level the weight does not hold, an implementation that
      does not take this form of weight or does not run on this device, or
      shapes that do not fit.
  """
  _check_implementation(weight, implementation)
  packed = isinstance(weight, formats.QTensor)
  inputs = weight.columns if packed else weight.inputs
  if isinstance(before, Gate):
    inputs *= 2
  if x.ndim != 2 or x.shape[1] != inputs:
    raise PrecisionError(
      f"x has shape {x.shape}; the weight takes [M, {inputs}]"
    )
  levels, present = _check_levels(levels, x.shape[0], weight, present)
  apart = isinstance(weight, _ONE_SEGMENT)
  if activation is None:
    activation = ActivationConfig(
      decoding=weight.decoding, overlapping=not apart
    )
  if activation.decoding != weight.decoding:
    raise PrecisionError(
      f"{activation.decoding=} differs from {weight.decoding=}"
    )
  if apart and activation.overlapping:
    raise PrecisionError(
      f"{_TAKES[type(weight)]!r} holds refined weights and refined activations"
      " in one segment, so that masks cannot overlap: say overlapping=False, or"
      " expand the weight for 'xla'"
    )
  if isinstance(weight, FragmentWeight | BlockScaledWeight):
    gpu = mosaic_sm90 if isinstance(weight, FragmentWeight) else mosaic_sm100
    gpu.check_device()
    layer = _only_layer(weight) if layer is None else layer
  elif not packed and layer is None:
    weight, layer = jax.tree.map(lambda a: a[None], weight), 0
  return _run(x, weight, layer, levels, before, activation, present, row_tile)


@partial(jax.jit, static_argnames=("activation", "present", "row_tile"))
def _run(x, weight, layer, levels, before, activation, present, row_tile):
  if isinstance(weight, FragmentWeight):
    return mosaic_sm90.extended_gemm(
      x,
      levels,
      weight,
      jnp.asarray(layer),
      activation=activation,
      present=present,
      before=before,
    )
  if before is not None:
    x = before(x, jnp.asarray(0 if layer is None else layer))
  rows = quantize_rows(
    x,
    levels,
    weight_mask=_mask(weight, layer),
    config=activation,
    element="e2m3" if weight.format == "fp6g" else "e2m1",
    present=present,
  )
  if _is_packed(weight):
    return reference.extended_gemm(rows, weight)
  if isinstance(weight, BlockScaledWeight):
    return mosaic_sm100.multiply(
      rows, weight, jnp.asarray(layer), present=present
    )
  return xla.extended_gemm(
    rows, weight, jnp.asarray(layer), present=present, row_tile=row_tile
  )


def _is_packed(weight):
  return isinstance(weight, formats.QTensor)


def _only_layer(weight):
  if weight.layers != 1:
    raise PrecisionError(
      f"this weight has {weight.layers} layers; say which by `layer`"
    )
  return 0


def _check_implementation(weight, implementation):
  known = tuple(_TAKES.values())
  if implementation not in (None, *known):
    raise PrecisionError(
      f"{implementation=} is unknown; known: {', '.join(map(repr, known))}"
    )
  if implementation not in (None, _TAKES[type(weight)]):
    raise PrecisionError(
      f"{implementation=} does not take a {type(weight).__name__};"
      " 'reference' takes a QTensor, 'xla' an ExpandedWeight made by"
      " expand([qtensor]), 'mosaic_sm90' a FragmentWeight made by"
      " prepack([[qtensor]]), 'mosaic_sm100' a BlockScaledWeight made by"
      " pack_block_scaled([[qtensor]])"
    )


def _mask(weight, layer):
  if not _is_packed(weight):
    return weight.mask[layer]
  return None if weight.refinement_mask is None else formats.mask_bits(weight)


def _check_levels(levels, rows, weight, present):
  """Levels as `[M]` int32, and the tuple of those that may occur."""
  concrete = None
  if not isinstance(levels, Tracer):
    concrete = tuple(sorted(set(np.asarray(levels).ravel().tolist())))
  levels = jnp.asarray(levels, jnp.int32)
  if levels.ndim == 0:
    levels = jnp.full((rows,), levels, jnp.int32)
  if levels.shape != (rows,):
    raise PrecisionError(f"levels has shape {levels.shape}; need [{rows}]")
  if present is None:
    present = concrete or weight.levels
  unknown = sorted(set(present) | set(concrete or ()))
  unknown = [level for level in unknown if level not in weight.levels]
  if unknown:
    raise PrecisionError(
      f"levels {unknown} are not held by a {weight.format} weight, which"
      f" offers {weight.levels}"
    )
  return levels, tuple(present)
