"""Weights with any bits that a format allows, for tests of packed forms."""

import jax.numpy as jnp
import numpy as np

from autoematic_jax import formats


def random_weight(
  rng: np.random.Generator,
  n: int,
  k: int,
  *,
  most: int = 2,
  decoding: formats.Decoding = "exponent",
  scales: tuple[int, int] = (1, 127),
) -> formats.QTensor:
  """An autofp6 tensor of random codes, scales and offsets.

  Args:
    rng: Random numbers.
    n: Outputs.
    k: Inputs.
    most: Refined subgroups of a group, at most.
    decoding: Step of the offsets.
    scales: Range of the scales' bits.
  """
  groups = -(-k // formats.GROUP)
  mask = np.zeros((groups, formats.SUBGROUPS_PER_GROUP), bool)
  for row in mask:
    row[rng.permutation(4)[: rng.integers(0, most, endpoint=True)]] = True
  codes = rng.integers(0, 256, (n, groups * 8), np.uint8)
  codes[:, k // 2 :] = 0
  scale = rng.integers(*scales, (n, groups), np.uint8)
  offsets = rng.integers(0, 256, (n, int(mask.sum())), np.uint8)
  return formats.QTensor(
    codes=jnp.asarray(codes),
    group_scale=jnp.asarray(scale).view(jnp.float8_e4m3fn),
    tensor_scale=jnp.asarray(2.0**-7, jnp.float32),
    refinement_mask=formats.pack_mask(jnp.asarray(mask.reshape(-1))),
    offsets=jnp.asarray(offsets),
    format="autofp6",
    decoding=decoding,
    columns=k,
  )
