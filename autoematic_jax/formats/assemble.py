"""QTensors put together from element values and offsets chosen elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int8, UInt8

from autoematic_jax.formats import autofp
from autoematic_jax.formats import elements
from autoematic_jax.formats import packing
from autoematic_jax.formats.qtensor import REFINED_FORMATS
from autoematic_jax.formats.qtensor import Format
from autoematic_jax.formats.qtensor import QTensor


def pack_codes(
  values: Float[Array, "N Kp"], format: Format
) -> UInt8[Array, "N C"]:
  """Packed codes of unscaled elements, which must be on the format's grid."""
  if format == "fp6g":
    return packing.pack_sextets(elements.encode_e2m3(values))
  return packing.pack_nibbles(elements.encode_e2m1(values))


def pack_offsets(d: Int8[Array, "N R"], format: Format) -> UInt8[Array, "N O"]:
  """Packed offsets of the refined columns, in ascending order."""
  if format == "autofp6":
    return packing.pack_pairs((d & 3).astype(jnp.uint8))
  return packing.pack_nibbles((d & 15).astype(jnp.uint8))


def assemble_qtensor(
  values: Float[Array, "N Kp"],
  group_scale: Float[Array, "N G"],
  tensor_scale: Float[Array, ""],
  *,
  format: Format,
  decoding: autofp.Decoding = "exponent",
  columns: int,
  refinement_mask: Bool[np.ndarray, "S"] | None = None,
  offsets: Int8[Array, "N Kp"] | None = None,
) -> QTensor:
  """A QTensor of given element values.

  Args:
    values: E2M1 (fp6g: E2M3) values before scaling; 0 in padding.
    group_scale: Decoded E4M3 scales.
    tensor_scale: Scale of the whole tensor.
    format: The tensor's format.
    decoding: Step of the offsets.
    columns: K before padding.
    refinement_mask: Refined subgroups; needed where the format has them.
    offsets: Offset of every element; only the refined ones are kept.

  Returns:
    The packed tensor.
  """
  mask = packed_offsets = None
  if format in REFINED_FORMATS:
    assert refinement_mask is not None
    assert offsets is not None
    # All columns are packed, the refined ones first: one program then serves
    # every tensor of a shape, however many of its subgroups are refined.
    marked = np.repeat(refinement_mask, packing.SUBGROUP)
    order = np.argsort(~marked, stable=True)
    packed = np.asarray(pack_offsets(offsets[:, order], format))
    width = packed.shape[1] * marked.sum() // marked.size
    packed_offsets = jax.device_put(packed[:, :width])
    mask = packing.pack_mask(jnp.asarray(refinement_mask))
  return QTensor(
    codes=pack_codes(values, format),
    group_scale=elements.encode_e4m3(group_scale),
    tensor_scale=tensor_scale,
    refinement_mask=mask,
    offsets=packed_offsets,
    format=format,
    decoding=decoding,
    columns=columns,
  )
