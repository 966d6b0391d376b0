"""Which tensors can lie in one stack of layers."""

from collections.abc import Sequence

import numpy as np

from autoematic_jax import formats
from autoematic_jax.errors import QTensorError

FORMATS: tuple[formats.Format, ...] = ("nvfp4", "autofp6")
"""Formats that the GPU kernels multiply by."""

Layers = Sequence[Sequence[formats.QTensor]]
"""Of each layer, the tensors that read the same input."""


def check_layers(layers: Layers) -> None:
  """Refuses what the GPU kernels cannot hold in one stack.

  Args:
    layers: Tensors `[N_i, K]`, joined along their outputs in each layer.

  Raises:
    QTensorError: The format has no such form, or tensors do not belong
      together.
  """
  first = layers[0][0]
  if first.format not in FORMATS:
    raise QTensorError(
      f"{first.format} has no form for the GPU kernels;"
      f" {' and '.join(FORMATS)} have"
    )
  outputs = [one.rows for one in layers[0]]
  for number, layer in enumerate(layers):
    if [one.rows for one in layer] != outputs:
      raise QTensorError(
        f"layer {number} has tensors of {[one.rows for one in layer]} outputs,"
        f" layer 0 of {outputs}"
      )
    for one in layer:
      _check_tensor(one, layer[0], first, number)


def _check_tensor(one, of_layer, first, number):
  if one.codes.ndim != 2:
    raise QTensorError(
      f"codes have shape {one.codes.shape}; give each layer's tensors"
      " by themselves, [N, K / 2]"
    )
  differ = formats.difference(first, one)
  if differ:
    raise QTensorError(f"tensors differ in {differ} in layer {number}")
  if not np.array_equal(formats.mask_bits(one), formats.mask_bits(of_layer)):
    raise QTensorError(
      f"tensors of layer {number} have different refinement masks"
    )
