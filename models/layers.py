"""Linear layers, norms and the precision that a layer runs at."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import bfloat16
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm import DECODE_ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm import PREFILL_ROW_TILE
from autoematic_jax.pallas_kernels.extended_gemm import Before
from autoematic_jax.pallas_kernels.extended_gemm import ExpandedWeight
from autoematic_jax.pallas_kernels.extended_gemm import FragmentWeight
from autoematic_jax.pallas_kernels.extended_gemm import Norm
from autoematic_jax.pallas_kernels.extended_gemm import at_layer
from autoematic_jax.pallas_kernels.extended_gemm import extended_gemm
from autoematic_jax.pallas_kernels.extended_gemm import matvec
from autoematic_jax.pallas_kernels.extended_gemm import rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
  """Which layer runs, and at which levels the requests of a batch run it.

  Attributes:
    layer: Index into the stacked weights.
    levels: `[B]` int32 bits.
    branch: Index into `choices` when all requests agree, else
      `len(choices)`: the mixed batch.
    choices: Levels that requests may ask for.
    kv_levels: `[B]` int32 bits of the new keys and values.
  """

  layer: Int[Array, ""]
  levels: Int[Array, "B"]
  kv_levels: Int[Array, "B"]
  branch: Int[Array, ""]
  choices: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  @classmethod
  def of(
    cls,
    layer: Int[Array, ""],
    levels: Int[Array, "B"],
    choices: Sequence[int],
    kv_levels: Int[Array, "B"] | None = None,
  ) -> "Precision":
    """The precision of a batch whose requests sit at `levels`.

    A dense model offers no choices and has the one branch 0. Keys and values
    are at the same levels where nothing else is said.
    """
    choices = tuple(choices)
    branch = jnp.int32(0)
    if choices:
      index = jnp.searchsorted(jnp.asarray(choices, jnp.int32), levels[0])
      agree = jnp.all(levels == levels[0])
      branch = jnp.where(agree, index, len(choices)).astype(jnp.int32)
    return cls(
      layer=layer,
      levels=levels,
      kv_levels=levels if kv_levels is None else kv_levels,
      branch=branch,
      choices=choices,
    )


class QuantizedLinear(nnx.Module):
  """`x @ weight.T + bias` at the precision of each request.

  The level is chosen by `lax.switch`: one branch a level, and one for batches
  whose requests disagree, which share a single GEMM. The weights of all layers
  are stacked, and the GEMM takes its layer out of them: a slice made outside
  the branch would be copied before the branch could read it.

  A GPU's decode steps do without the switch, for which the host would wait in
  every layer: the kernels of a FragmentWeight see the levels on the device.
  """

  def __init__(
    self,
    weight: ExpandedWeight | FragmentWeight,
    bias: Float[Array, "N"] | None = None,
    activation: ActivationConfig | None = None,
  ):
    self.weight = nnx.Param(weight)
    self.bias = nnx.Param(bias) if bias is not None else None
    self.activation = activation

  @property
  def runs_on_hopper(self) -> bool:
    """Whether its products are the Hopper kernels'."""
    return isinstance(self.weight.get_value(), FragmentWeight)

  def __call__(
    self, x: Float[Array, "B T F"], precision: Precision, before: Before = None
  ) -> Float[Array, "B T N"]:
    batch, tokens, _ = x.shape
    stacked = self.weight.get_value()
    on_device = tokens == 1 and self.runs_on_hopper
    if before is not None and not on_device:
      x, before = before(x, precision.layer), None
    gemm = partial(
      extended_gemm,
      activation=self.activation,
      row_tile=DECODE_ROW_TILE if tokens == 1 else PREFILL_ROW_TILE,
      before=before,
    )

    def branch(present):
      def run(rows, levels):
        return gemm(
          rows, stacked, levels, present=present, layer=precision.layer
        )

      return run

    rows = x.reshape(batch * tokens, x.shape[-1])
    levels = jnp.repeat(precision.levels, tokens)
    if on_device:
      out = branch(precision.choices)(rows, levels)
    else:
      branches = [branch((level,)) for level in precision.choices]
      if batch > 1 and len(precision.choices) > 1:
        branches.append(branch(precision.choices))
      out = lax.switch(precision.branch, branches, rows, levels)
    out = out.reshape(batch, tokens, -1)
    return _add_bias(out, self.bias, precision.layer)


class DenseLinear(nnx.Module):
  """`x @ kernel.T + bias` in floating point, of stacked kernels."""

  def __init__(
    self,
    kernel: bfloat16.Stored,
    bias: Float[Array, "N"] | None = None,
  ):
    self.kernel = nnx.Param(kernel)
    self.bias = nnx.Param(bias) if bias is not None else None

  def __call__(
    self, x: Float[Array, "B T F"], precision: Precision, before: Before = None
  ) -> Float[Array, "B T N"]:
    if before is not None:
      x = before(x, precision.layer)
    batch, tokens, width = x.shape
    kernel = at_layer(self.kernel.get_value(), precision.layer)
    rows = bfloat16.rounded(x.reshape(batch * tokens, width), kernel)
    out = dense_rows(rows, kernel, one_by_one=tokens == 1, rounded=True)
    out = out.reshape(batch, tokens, -1)
    return _add_bias(out, self.bias, precision.layer)


def _add_bias(out, bias, layer):
  return out if bias is None else out + at_layer(bias.get_value(), layer)


def dense_rows(
  rows: Float[Array, "M K"],
  kernel: bfloat16.Stored,
  *,
  one_by_one: bool,
  rounded: bool = False,
) -> Float[Array, "M N"]:
  """`rows @ kernel.T` in float32.

  Args:
    rows: Inputs.
    kernel: `[N, K]`, stored as float32 or bfloat16.
    one_by_one: On a CPU, one dot a row, so that a row's bits do not depend on
      how many rows there are.
    rounded: Whether the rows are in the kernel's precision.

  Returns:
    float32 products.
  """
  return lax.platform_dependent(
    rows,
    kernel,
    cpu=partial(_dense_rows_cpu, one_by_one=one_by_one),
    default=partial(_dense_rows_gpu, rounded=rounded),
  )


def _dense_rows_gpu(rows, kernel, *, rounded):
  if kernel.dtype != jnp.uint16:
    return jnp.dot(rows, kernel.T, precision=lax.Precision.HIGHEST)
  kernel = lax.bitcast_convert_type(kernel, jnp.bfloat16)
  if len(rows) == 1:
    return jnp.sum(kernel.astype(jnp.float32) * rows, axis=1)[None]
  parts = [rows.astype(jnp.bfloat16)]
  if not rounded:
    # What rounding lost, in rows of its own: reading the kernel takes longest.
    rest = rows - parts[0].astype(jnp.float32)
    parts.append(rest.astype(jnp.bfloat16))
  out = jnp.dot(
    jnp.concatenate(parts), kernel.T, preferred_element_type=jnp.float32
  )
  return out if rounded else out[: len(rows)] + out[len(rows) :]


def _dense_rows_cpu(rows, kernel, *, one_by_one):
  widened = bfloat16.to_float32(kernel)
  if not one_by_one:
    return jnp.dot(rows, widened.T, precision=lax.Precision.HIGHEST)
  if rows.shape[0] == 1:
    return matvec(widened, rows[0])[None]
  return lax.map(partial(matvec, widened), rows)


def output_head(
  hidden: Float[Array, "B D"], kernel: bfloat16.Stored, *, one_by_one: bool
) -> Float[Array, "B V"]:
  """Logits in float32; `one_by_one` is that of `dense_rows`."""
  return lax.platform_dependent(
    hidden,
    kernel,
    cpu=partial(_output_head_cpu, one_by_one=one_by_one),
    default=partial(dense_rows, one_by_one=one_by_one),
  )


def _output_head_cpu(hidden, kernel, *, one_by_one):
  """A cacheful of the vocabulary at a time.

  Reading the head once for all requests, rather than once a request, is what
  the chunks are for.
  """
  vocab, width = kernel.shape
  chunk = _chunk_rows(vocab, width)

  def logits(index):
    part = lax.dynamic_slice_in_dim(kernel, index * chunk, chunk)
    return dense_rows(hidden, part, one_by_one=one_by_one)

  chunks = lax.map(logits, jnp.arange(vocab // chunk))
  return chunks.swapaxes(0, 1).reshape(hidden.shape[0], vocab)


def _chunk_rows(vocab, width, cache_bytes=6 << 20):
  """Largest divisor of `vocab` whose float32 rows fit `cache_bytes`."""
  most = max(1, cache_bytes // (4 * width))
  chunk = next(n for n in range(min(vocab, most), 0, -1) if vocab % n == 0)
  return chunk if chunk >= 256 else vocab


class RMSNorm(nnx.Module):
  """Root-mean-square norm in float32, of one scale or of stacked ones."""

  def __init__(self, scale: Float[Array, "D"], epsilon: float):
    self.scale = nnx.Param(scale)
    self.epsilon = epsilon

  def __call__(
    self, x: Float[Array, "*B D"], layer: Int[Array, ""] | None = None
  ) -> Float[Array, "*B D"]:
    scale = self.scale.get_value() if layer is None else self.of_layer(layer)
    return rms_norm(x, scale, self.epsilon)

  def of_layer(self, layer: Int[Array, ""]) -> Float[Array, "D"]:
    """One layer's scale, of stacked ones."""
    return at_layer(self.scale.get_value(), layer)

  def before(self) -> Norm:
    """The norms of all layers, for the projection that reads them."""
    return Norm(scale=self.scale.get_value(), epsilon=self.epsilon)
