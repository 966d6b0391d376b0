"""Quantizing weights: scales, codes, which subgroups to refine, offsets."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int8

from autoematic_jax.arithmetic import exact_divide
from autoematic_jax.errors import NonFiniteError
from autoematic_jax.errors import QTensorError
from autoematic_jax.formats import autofp
from autoematic_jax.formats import elements
from autoematic_jax.formats import packing
from autoematic_jax.formats import scaling
from autoematic_jax.formats.assemble import pack_codes
from autoematic_jax.formats.assemble import pack_offsets
from autoematic_jax.formats.packing import MAX_REFINED_PER_GROUP
from autoematic_jax.formats.qtensor import LEVELS
from autoematic_jax.formats.qtensor import REFINED_FORMATS
from autoematic_jax.formats.qtensor import Format
from autoematic_jax.formats.qtensor import QTensor
from autoematic_jax.formats.qtensor import padded


def check_finite(name: str, array: np.ndarray) -> None:
  """Refuses NaN and Inf in a weight.

  Raises:
    NonFiniteError: Names the tensor and counts both.
  """
  if np.isfinite(array).all():
    return
  nan, inf = int(np.isnan(array).sum()), int(np.isinf(array).sum())
  raise NonFiniteError(
    f"{name} holds {nan} NaN and {inf} Inf out of {array.size} values"
  )


def quantize_weight(
  w: Float[Array | np.ndarray, "N K"],
  *,
  format: Format,
  rho: float = 0.2,
  decoding: autofp.Decoding = "exponent",
  refinement_mask: Bool[Array | np.ndarray, "S"] | None = None,
) -> QTensor:
  """Rounds a matrix to a packed format.

  Args:
    w: Finite weights (see `check_finite`); K is zero-padded to a multiple of
      16.
    format: Target format.
    rho: Share of the subgroups that are refined (autofp6, autofp8).
    decoding: Step of the offsets.
    refinement_mask: `[Kp / 4]` concrete flags of the subgroups to refine; None
      chooses them by squared error.

  Returns:
    The packed tensor.

  Raises:
    QTensorError: The format or decoding is unknown, `w` is no matrix, `rho` is
      outside [0, 0.5] or the mask has another width.
  """
  _check_options(format, decoding)
  _check_matrix(w)
  rows_scaled = partial(_quantize, format=format, decoding=decoding)
  columns = w.shape[1]
  if format not in REFINED_FORMATS:
    codes, group_scale, tensor_scale, _ = rows_scaled(w, None)
    mask = offsets = None
  else:
    if refinement_mask is None:
      refinement_mask = shared_refinement_mask(
        [w], format=format, rho=rho, decoding=decoding
      )
    marked = np.asarray(refinement_mask, bool)
    subgroups = padded(columns) // packing.SUBGROUP
    if marked.shape != (subgroups,):
      raise QTensorError(
        f"refinement_mask has shape {marked.shape}; {columns} columns need"
        f" [{subgroups}]"
      )
    refined = np.flatnonzero(np.repeat(marked, packing.SUBGROUP))
    codes, group_scale, tensor_scale, offsets = rows_scaled(
      w, jnp.asarray(refined, jnp.int32)
    )
    mask = packing.pack_mask(jnp.asarray(marked))
  return QTensor(
    codes=codes,
    group_scale=group_scale,
    tensor_scale=tensor_scale,
    refinement_mask=mask,
    offsets=offsets,
    format=format,
    decoding=decoding,
    columns=columns,
  )


def quantize_weights(
  weights: Sequence[Float[Array | np.ndarray, "_ K"]],
  *,
  format: Format,
  rho: float = 0.2,
  decoding: autofp.Decoding = "exponent",
) -> list[QTensor]:
  """`quantize_weight` of matrices that read one input, and so share a mask."""
  mask = shared_refinement_mask(
    weights, format=format, rho=rho, decoding=decoding
  )
  return [
    quantize_weight(
      w, format=format, rho=rho, decoding=decoding, refinement_mask=mask
    )
    for w in weights
  ]


def largest_element(format: Format) -> float:
  """Largest value of an element before scaling."""
  return 7.5 if format == "fp6g" else 6.0


def round_element(
  scaled: Float[Array, "*S"], format: Format
) -> Float[Array, "*S"]:
  """Nearest element value of a format's base."""
  if format == "fp6g":
    return elements.round_e2m3(scaled)
  return elements.round_e2m1(scaled)


def refine_element(
  scaled: Float[Array, "*S"],
  base: Float[Array, "*S"],
  format: Format,
  decoding: autofp.Decoding,
) -> tuple[Int8[Array, "*S"], Float[Array, "*S"]]:
  """Offset of each element, and what it adds at the highest level.

  Args:
    scaled: Elements divided by their scale.
    base: Their E2M1 base.
    format: `autofp6` or `autofp8`.
    decoding: Step of the offsets.
  """
  if format == "autofp6":
    d = autofp.offset(scaled, base, decoding)
    return d, autofp.offset_delta(d, base, decoding)
  d = autofp.offset8(scaled, base, decoding)
  return d, autofp.offset8_delta(d, base, decoding)


def _check_options(format, decoding):
  if format not in LEVELS:
    raise QTensorError(f"format {format!r} is not one of {sorted(LEVELS)}")
  if decoding not in ("fixed", "exponent"):
    raise QTensorError(f"decoding {decoding!r} is not fixed or exponent")


def _check_matrix(w):
  if w.ndim != 2 or not w.size:
    raise QTensorError(
      f"w has shape {list(w.shape)}; need [N, K] with N and K at least 1"
    )


@partial(jax.jit, static_argnames=("format", "decoding"))
def _quantize(w, refined, *, format, decoding):
  """Codes, scales and, for the refined columns, packed offsets."""
  scaled, tensor_scale, group_scale = _scaled(w, format)
  stored_scale = elements.encode_e4m3(group_scale)
  base = round_element(scaled, format)
  codes = pack_codes(base, format)
  if refined is None:
    return codes, stored_scale, tensor_scale, None
  scaled, base = scaled[:, refined], base[:, refined]
  d, _ = refine_element(scaled, base, format, decoding)
  return codes, stored_scale, tensor_scale, pack_offsets(d, format)


def _scaled(w, format):
  """Padded elements divided by their scale, and the scales."""
  columns = w.shape[1]
  w = jnp.pad(w.astype(jnp.float32), ((0, 0), (0, padded(columns) - columns)))
  largest = largest_element(format)
  tensor_scale = scaling.tensor_scale(w, largest)
  group_scale = scaling.group_scale(
    w, tensor_scale, largest, scaling.SMALLEST_WEIGHT_SCALE
  )
  scale = jnp.repeat(group_scale, packing.GROUP, axis=1) * tensor_scale
  return exact_divide(w, scale), tensor_scale, group_scale


def refinement_gain(
  w: Float[Array | np.ndarray, "N K"],
  *,
  format: Format,
  decoding: autofp.Decoding,
  importance: Float[np.ndarray, "K"] | None = None,
) -> Float[np.ndarray, "S"]:
  """Squared error that refining each subgroup would remove from all rows.

  Args:
    w: Weights.
    format: `autofp6` or `autofp8`.
    decoding: Step of the offsets.
    importance: Weight of each column's error, such as the mean square of its
      input; None weighs all alike.

  Returns:
    `[Kp / 4]` float64 on the host, in squared units of the weights, so that
    those of matrices with one input add up; 0 in padding, NaN where weights
    are not finite.

  Raises:
    QTensorError: The format has no refinement, or `w` is no matrix.
  """
  _check_options(format, decoding)
  if format not in REFINED_FORMATS:
    raise QTensorError(
      f"{format} has no refinement; one of {sorted(REFINED_FORMATS)} has"
    )
  _check_matrix(w)
  gain, tensor_scale = _gain(w, format=format, decoding=decoding)
  gain = np.asarray(gain, np.float64)
  if importance is not None:
    gain[: w.shape[1]] *= importance
  # The square of a tensor scale can leave the range of float32.
  with np.errstate(invalid="ignore"):
    gain *= np.float64(tensor_scale) ** 2
  return gain.reshape(-1, packing.SUBGROUP).sum(axis=1)


@partial(jax.jit, static_argnames=("format", "decoding"))
def _gain(w, *, format, decoding):
  """Gain of each column in units of the squared tensor scale, and that."""
  scaled, tensor_scale, group_scale = _scaled(w, format)
  base = elements.round_e2m1(scaled)
  _, delta = refine_element(scaled, base, format, decoding)
  # error^2 - (error - delta)^2; as a difference of squares it would not be
  # exactly 0 where delta is.
  gain = delta * (2 * (scaled - base) - delta)
  scale = jnp.repeat(group_scale, packing.GROUP, axis=1)
  return jnp.sum(gain * jnp.square(scale), axis=0), tensor_scale


def shared_refinement_mask(
  weights: Sequence[Float[Array | np.ndarray, "_ K"]],
  *,
  format: Format,
  rho: float,
  decoding: autofp.Decoding,
  importance: Float[np.ndarray, "K"] | None = None,
) -> Bool[np.ndarray, "S"] | None:
  """Subgroups to refine in all of several matrices with one input.

  Args:
    weights: Matrices of one width.
    format: Their format.
    rho: Share of the subgroups to refine.
    decoding: Step of the offsets.
    importance: See `refinement_gain`.

  Returns:
    `[Kp / 4]` flags; None for a format without refinement.
  """
  if format not in REFINED_FORMATS:
    return None
  gains = [
    refinement_gain(w, format=format, decoding=decoding, importance=importance)
    for w in weights
  ]
  budget = refinement_budget(weights[0].shape[1], rho)
  return select_refinement_mask(np.sum(gains, axis=0), budget)


def refinement_budget(columns: int, rho: float) -> int:
  """Subgroups to refine in a tensor of `columns` inputs.

  Args:
    columns: K, before padding.
    rho: Share of the subgroups of the padded width.

  Returns:
    R, at least 1 unless `rho` is 0.

  Raises:
    QTensorError: `rho` is outside [0, 0.5].
  """
  if not 0 <= rho <= MAX_REFINED_PER_GROUP / packing.SUBGROUPS_PER_GROUP:
    raise QTensorError(
      f"rho={rho} must be in [0, 0.5]: at most {MAX_REFINED_PER_GROUP} of the"
      f" {packing.SUBGROUPS_PER_GROUP} subgroups of a group are refined"
    )
  if rho == 0:
    return 0
  return max(1, round(rho * padded(columns) / packing.SUBGROUP))


def select_refinement_mask(
  gain: Float[Array | np.ndarray, "S"],
  budget: int,
  max_per_group: int = MAX_REFINED_PER_GROUP,
) -> Bool[np.ndarray, "S"]:
  """The subgroups of largest gain, at most `max_per_group` in a group.

  Args:
    gain: Concrete gain of each subgroup; ties go to the lower index, so that
      padding, which comes last and gains 0, is chosen last.
    budget: Subgroups to choose.
    max_per_group: Bound for each group.

  Returns:
    `[S]` flags, `budget` of them True.

  Raises:
    QTensorError: The budget is negative or the bound leaves fewer subgroups.
  """
  gain = np.asarray(gain, np.float64)
  groups = gain.reshape(-1, packing.SUBGROUPS_PER_GROUP)
  if not 0 <= budget <= groups.shape[0] * max_per_group:
    raise QTensorError(
      f"{budget=} subgroups cannot be refined with at most"
      f" {max_per_group} in each of {groups.shape[0]} groups"
    )
  rank = np.argsort(np.argsort(-groups, axis=1, kind="stable"), axis=1)
  eligible = np.flatnonzero((rank < max_per_group).ravel())
  order = np.argsort(-gain[eligible], kind="stable")
  mask = np.zeros(gain.shape, bool)
  mask[eligible[order[:budget]]] = True
  return mask
