"""The ways in which a product is computed, to be timed against each other."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from autoematic_jax import formats
from autoematic_jax.evaluation import synthetic
from autoematic_jax.pallas_kernels.activation_quantization import QuantizedRows
from autoematic_jax.pallas_kernels.activation_quantization import quantize_rows
from autoematic_jax.pallas_kernels.extended_gemm import DECODE_ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm import PREFILL_ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90
from autoematic_jax.pallas_kernels.extended_gemm import xla

FORMS = (
  "bf16",
  "nvfp4",
  "autofp6",
  "mixed",
  "sub-batches",
  "extended-k",
  "separate",
)
"""`mixed` and `sub-batches`: half of the rows at 4 bits and half at 6, in one
product or in one for each level. `extended-k` and `separate`: the paper's way
to refine, further NVFP4 columns for a fifth of K, in one product or in one of
their own whose result is added."""

_EXTRA = 0.2
"""Share of K that further columns refine."""


@dataclasses.dataclass(frozen=True)
class Case:
  """One form with its operands.

  Attributes:
    operand: Activations, quantized but for bf16.
    weight: Weights of all layers.
    run: Product of the operand and one layer of the weight.
    nbytes: Of one layer's weights.
    wanted: The last layer's product in float32.
  """

  operand: Any
  weight: Any
  run: Callable[..., Float[Array, "M N"]]
  nbytes: int
  wanted: Float[Array, "M N"]


class Forms:
  """Cases of one shape, which share random weights of some layers.

  Args:
    n: Outputs.
    k: Inputs.
    layers: How many, together more than the L2 cache of a GPU holds.
  """

  def __init__(self, n: int, k: int, layers: int):
    self.layers = [synthetic.random_weight(one, n, k) for one in range(layers)]
    self.n, self.k = n, k
    self._packed: dict[Any, Any] = {}

  def case(self, form: str, m: int) -> Case:
    """A form with `m` rows."""
    x = jax.random.normal(jax.random.key(m), (m, self.k), jnp.float32)
    if form == "bf16":
      return self._bf16(x)
    if form in ("extended-k", "separate"):
      return self._extended(form, x)
    levels = np.resize({"nvfp4": 4, "autofp6": 6}.get(form, [4, 6]), m)
    present = tuple(np.unique(levels).tolist())
    rows = quantize_rows(x, jnp.asarray(levels, jnp.int32), present=present)
    name, layers = "autofp6", self.layers
    if form == "nvfp4":
      name, layers = form, list(map(synthetic.without_offsets, layers))
    run = _apart(levels) if form == "sub-batches" else partial(_run, present)
    return Case(
      operand=rows,
      weight=self._pack(name, layers, m),
      run=run,
      nbytes=layers[0].nbytes,
      wanted=_expected(rows, layers[-1], levels),
    )

  def _bf16(self, x):
    if "bf16" not in self._packed:
      self._packed["bf16"] = [
        formats.dequantize(one).astype(jnp.bfloat16) for one in self.layers
      ]

    def dot(x, weights, layer):
      # Layers lie apart: taking one of a stack would copy it.
      return jnp.dot(x, weights[layer].T, preferred_element_type=jnp.float32)

    weight = formats.dequantize(self.layers[-1])
    return Case(
      operand=x.astype(jnp.bfloat16),
      weight=self._packed["bf16"],
      run=dot,
      nbytes=2 * self.n * self.k,
      wanted=jnp.dot(x, weight.T, precision="highest"),
    )

  def _extended(self, form, x):
    """Base columns and, for the first of K again, columns that refine them."""
    m, extra = len(x), round(_EXTRA * self.k / formats.GROUP) * formats.GROUP
    base = list(map(synthetic.without_offsets, self.layers))
    more = [
      synthetic.without_offsets(synthetic.random_weight(99 + n, self.n, extra))
      for n in range(len(base))
    ]
    rows = quantize_rows(x, jnp.full((m,), 4), present=(4,))
    again = _first_columns(rows, extra)
    levels = np.full((m,), 4)
    wanted = _expected(rows, base[-1], levels)
    wanted += _expected(again, more[-1], levels)
    both = list(map(_joined, base, more))
    if form == "extended-k":
      operand = jax.tree.map(partial(_side_by_side, m), rows, again)
      weight, run = self._pack(form, both, m), partial(_run, (4,))
    else:
      operand = rows, again
      weight = self._pack("base", base, m), self._pack("more", more, m)
      run = _run_both

    return Case(operand, weight, run, both[0].nbytes, wanted)

  def _pack(self, name, layers, m):
    key = name, m <= 16
    if key not in self._packed:
      self._packed[key] = synthetic.stacked(layers, 16 if m <= 16 else 64)
    return self._packed[key]


def _first_columns(rows: QuantizedRows, count: int) -> QuantizedRows:
  return dataclasses.replace(
    rows,
    values=rows.values[:, :count],
    delta=rows.delta[:, :count],
    mask=rows.mask[:, : count // formats.SUBGROUP],
    group_scale=rows.group_scale[:, : count // formats.GROUP],
  )


def _side_by_side(m, a, b):
  """Columns of both; what a row has one of stays as it is."""
  return a if a.shape in ((m,), (m, 1)) else jnp.concatenate([a, b], axis=1)


def _joined(a, b):
  """Columns of two nvfp4 tensors of one tensor scale."""
  return dataclasses.replace(
    a,
    codes=jnp.concatenate([a.codes, b.codes], axis=1),
    group_scale=jnp.concatenate([a.group_scale, b.group_scale], axis=1),
    columns=a.columns + b.columns,
  )


def _run(present, rows, weight, layer):
  layer = jnp.asarray(layer)
  if synthetic.implementation() == "mosaic_sm90":
    return mosaic_sm90.multiply(rows, weight, layer, present=present)
  tile = PREFILL_ROW_TILE if len(rows.levels) > 8 else DECODE_ROW_TILE
  return xla.extended_gemm(rows, weight, layer, present=present, row_tile=tile)


def _run_both(rows, weights, layer):
  """Two products at 4 bits, added."""
  pairs = zip(rows, weights, strict=True)
  first, second = (_run((4,), *pair, layer) for pair in pairs)
  return first + second


def _apart(levels):
  """Each level's rows in a product of their own."""
  parts = {level: np.flatnonzero(levels == level) for level in (4, 6)}
  parts = {level: part for level, part in parts.items() if len(part)}
  order = np.argsort(np.concatenate(list(parts.values())))

  def run(rows, weight, layer):
    products = []
    for level, part in parts.items():
      some = jax.tree.map(lambda array, part=part: array[part], rows)
      products.append(_run((level,), some, weight, layer))
    return jnp.concatenate(products)[order]

  return run


def _expected(rows, weight, levels):
  """Float32 products, each row's at its level."""
  a = rows.scaled(rows.values + rows.delta) * rows.tensor_scale
  out = jnp.zeros((len(levels), weight.rows), jnp.float32)
  for level in np.unique(levels).tolist():
    w = formats.dequantize(weight, level)
    product = jnp.dot(a, w.T, precision="highest")
    out = jnp.where((levels == level)[:, None], product, out)
  return out
