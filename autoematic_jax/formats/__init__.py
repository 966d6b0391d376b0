"""Number formats: NVFP4, FP6g, AutoFP2, AutoFP6 and AutoFP8.

Pure functions on JAX arrays. Every format scales groups of 16 along K by an
E4M3 scale and the tensor (or the activation row) by a float32 scale.
"""

from autoematic_jax.formats.assemble import assemble_qtensor
from autoematic_jax.formats.autofp import AUTOFP2_SCALE
from autoematic_jax.formats.autofp import Decoding
from autoematic_jax.formats.autofp import autofp2_digit
from autoematic_jax.formats.autofp import nearest_pair
from autoematic_jax.formats.autofp import offset
from autoematic_jax.formats.autofp import offset8
from autoematic_jax.formats.autofp import offset8_delta
from autoematic_jax.formats.autofp import offset8_to_offset6
from autoematic_jax.formats.autofp import offset_delta
from autoematic_jax.formats.autofp import refine_to_6
from autoematic_jax.formats.autofp import split_offset8
from autoematic_jax.formats.elements import decode_e2m1
from autoematic_jax.formats.elements import decode_e2m3
from autoematic_jax.formats.elements import decode_e4m3
from autoematic_jax.formats.elements import encode_e2m1
from autoematic_jax.formats.elements import encode_e2m3
from autoematic_jax.formats.elements import encode_e4m3
from autoematic_jax.formats.elements import round_e2m1
from autoematic_jax.formats.elements import round_e2m3
from autoematic_jax.formats.elements import round_e4m3
from autoematic_jax.formats.packing import GROUP
from autoematic_jax.formats.packing import MAX_REFINED_PER_GROUP
from autoematic_jax.formats.packing import SUBGROUP
from autoematic_jax.formats.packing import SUBGROUPS_PER_GROUP
from autoematic_jax.formats.packing import pack_mask
from autoematic_jax.formats.packing import pack_nibbles
from autoematic_jax.formats.packing import pack_pairs
from autoematic_jax.formats.packing import pack_sextets
from autoematic_jax.formats.packing import unpack_mask
from autoematic_jax.formats.packing import unpack_nibbles
from autoematic_jax.formats.packing import unpack_pairs
from autoematic_jax.formats.packing import unpack_sextets
from autoematic_jax.formats.qtensor import LEVELS
from autoematic_jax.formats.qtensor import REFINED_FORMATS
from autoematic_jax.formats.qtensor import Format
from autoematic_jax.formats.qtensor import QTensor
from autoematic_jax.formats.qtensor import decode_base
from autoematic_jax.formats.qtensor import decode_offsets
from autoematic_jax.formats.qtensor import dequantize
from autoematic_jax.formats.qtensor import difference
from autoematic_jax.formats.qtensor import mask_bits
from autoematic_jax.formats.qtensor import refined_columns
from autoematic_jax.formats.qtensor import validate_qtensor
from autoematic_jax.formats.qtensor import with_room
from autoematic_jax.formats.quantize import check_finite
from autoematic_jax.formats.quantize import largest_element
from autoematic_jax.formats.quantize import quantize_weight
from autoematic_jax.formats.quantize import quantize_weights
from autoematic_jax.formats.quantize import refine_element
from autoematic_jax.formats.quantize import refinement_budget
from autoematic_jax.formats.quantize import refinement_gain
from autoematic_jax.formats.quantize import round_element
from autoematic_jax.formats.quantize import select_refinement_mask
from autoematic_jax.formats.quantize import shared_refinement_mask
from autoematic_jax.formats.scaling import SMALLEST_WEIGHT_SCALE
from autoematic_jax.formats.scaling import group_scale
from autoematic_jax.formats.scaling import row_tensor_scale
from autoematic_jax.formats.scaling import tensor_scale

__all__ = [
  "AUTOFP2_SCALE",
  "GROUP",
  "LEVELS",
  "MAX_REFINED_PER_GROUP",
  "REFINED_FORMATS",
  "SMALLEST_WEIGHT_SCALE",
  "SUBGROUP",
  "SUBGROUPS_PER_GROUP",
  "Decoding",
  "Format",
  "QTensor",
  "assemble_qtensor",
  "autofp2_digit",
  "check_finite",
  "decode_base",
  "decode_e2m1",
  "decode_e2m3",
  "decode_e4m3",
  "decode_offsets",
  "dequantize",
  "difference",
  "encode_e2m1",
  "encode_e2m3",
  "encode_e4m3",
  "group_scale",
  "largest_element",
  "mask_bits",
  "nearest_pair",
  "offset",
  "offset8",
  "offset8_delta",
  "offset8_to_offset6",
  "offset_delta",
  "pack_mask",
  "pack_nibbles",
  "pack_pairs",
  "pack_sextets",
  "quantize_weight",
  "quantize_weights",
  "refine_element",
  "refine_to_6",
  "refined_columns",
  "refinement_budget",
  "refinement_gain",
  "round_e2m1",
  "round_e2m3",
  "round_e4m3",
  "round_element",
  "row_tensor_scale",
  "select_refinement_mask",
  "shared_refinement_mask",
  "split_offset8",
  "tensor_scale",
  "unpack_mask",
  "unpack_nibbles",
  "unpack_pairs",
  "unpack_sextets",
  "validate_qtensor",
  "with_room",
]
