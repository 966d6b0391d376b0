"""The GEMM on a Hopper GPU, from weights in fragment order.

Few rows run the decode kernels of `sm90`, in turns where they are a few more
than those take. For many rows the layer is decoded to float16 in device memory
and multiplied by XLA: it is written and read once, at 2 bytes a weight.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import device
from autoematic_jax.pallas_kernels.extended_gemm.before import Before
from autoematic_jax.pallas_kernels.extended_gemm.fragments import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Mode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.plan import Tile
from autoematic_jax.pallas_kernels.extended_gemm.sm90.rows import permute_rows
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import STREAM_ROWS
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import choose_tile

LEVELS = (4, 6)
"""Bits that rows can run at."""

_CAPABILITY = "9.0"


def runs() -> bool:
  """Whether the default device is a Hopper GPU."""
  return device.runs_on(_CAPABILITY)


def check_device() -> None:
  """Refuses a default device that is no Hopper GPU.

  Raises:
    PrecisionError: Names the device and what to use there.
  """
  device.check_device("mosaic_sm90", _CAPABILITY, "Hopper")


def extended_gemm(
  x: Float[Array, "M K"],
  levels: Int[Array, "M"],
  weight: FragmentWeight,
  layer: Int[Array, ""],
  *,
  activation: ActivationConfig,
  present: Sequence[int],
  before: Before = None,
) -> Float[Array, "M N"]:
  """Rows at mixed levels, quantized here, against one layer of a stack.

  A row's bits do not change with its neighbours nor with their number, as long
  as they are few enough for the decode kernels.

  Args:
    x: Activations.
    levels: 4 or 6 for each row.
    weight: Stacked weights in fragment order.
    layer: Which of them.
    activation: How x is refined.
    present: Levels that may occur. Which do is seen on the device; up to 16
      rows, those that agree cost what they would alone.
    before: What is done to x first.

  Returns:
    `[M, N]` float32.
  """
  few = not _are_many(x, weight, present) and weight.inputs % 4 == 0
  if not (few and activation.overlapping):
    x = x if before is None else before(x, layer)
    rows = quantize_rows(
      x,
      levels,
      weight_mask=weight.mask[layer],
      config=activation,
      present=present,
    )
    return multiply(rows, weight, layer, present=present)
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.extended_gemm.sm90 import quantize

  values, scale = quantize.quantize_in_order(
    x,
    levels,
    weight.sources,
    layer,
    config=activation,
    refine=6 in present,
    before=before,
  )
  return _in_turns(values, scale, levels, weight, layer, present)


def multiply(
  rows: QuantizedRows,
  weight: FragmentWeight,
  layer: Int[Array, ""],
  *,
  present: Sequence[int],
) -> Float[Array, "M N"]:
  """`extended_gemm` of rows that are quantized already."""
  # Imports Mosaic, which a CPU does without.
  from autoematic_jax.pallas_kernels.extended_gemm.sm90 import launch

  # Exact: see the test over every element, offset and scale.
  x = rows.scaled(rows.values + rows.delta).astype(jnp.float16)
  if _are_many(x, weight, present):
    return launch.many_rows_gemm(
      x, weight, rows.tensor_scale, rows.levels, layer, mode=_mode(present)
    )
  if weight.offsets is not None:
    x = permute_rows(x, weight.sources[layer])
  scale = rows.tensor_scale[:, 0]
  return _in_turns(x, scale, rows.levels, weight, layer, present)


def _are_many(x, weight, present):
  return x.shape[0] > weight.max_rows * _TURNS[_mode(present)]


def _in_turns(x, scale, levels, weight, layer, present):
  """Runs the decode kernels on as many rows at a time as they take."""
  from autoematic_jax.pallas_kernels.extended_gemm.sm90 import launch

  out = []
  for first in range(0, x.shape[0], weight.max_rows):
    some = slice(first, first + weight.max_rows)
    tiles = _tiles(weight, x[some].shape[0], _mode(present))
    out.append(
      launch.decode_gemm(
        x[some],
        weight,
        scale[some],
        levels[some],
        layer.reshape(1),
        tiles=tiles,
      )
    )
  return out[0] if len(out) == 1 else jnp.concatenate(out)


_TURNS = {"4": 8, "6": 4, "mixed": 2}
"""How often a decode kernel may run, for rows beyond those it takes, before it
is faster to decode the layer once and multiply all rows."""


def _tiles(weight, rows, mode: Mode) -> dict[Mode, Tile]:
  """The tile of each mode that one kernel chooses from on the device."""
  modes: tuple[Mode, ...] = (mode,)
  if mode == "mixed" and weight.max_rows == STREAM_ROWS:
    modes = ("4", "6") if rows == 1 else ("4", "6", "mixed")
  return {one: choose_tile(weight, rows, one) for one in modes}


def _mode(present) -> Mode:
  if len(set(present)) > 1:
    return "mixed"
  return "4" if present[0] == 4 else "6"
