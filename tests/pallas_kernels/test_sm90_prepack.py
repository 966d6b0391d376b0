"""The fragment order on a CPU, and the kernel's decoding on numpy integers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from packed_weights import random_weight
from unpacked_weights import unpack_layer

from autoematic_jax import formats
from autoematic_jax.errors import QTensorError
from autoematic_jax.pallas_kernels.extended_gemm import prepack
from autoematic_jax.pallas_kernels.extended_gemm.fragments import UNIT_WORDS
from autoematic_jax.pallas_kernels.extended_gemm.prepack import column_order
from autoematic_jax.pallas_kernels.extended_gemm.sm90 import decode
from autoematic_jax.pallas_kernels.extended_gemm.sm90.tiles import Packing
from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx


def make(rng, n, k, fmt="autofp6", decoding="exponent", rho=0.2):
  return formats.quantize_weight(
    jnp.asarray(rng.standard_t(4, (n, k)).astype(np.float32)),
    format=fmt,
    rho=rho,
    decoding=decoding,
  )


def dequantized(layer, level):
  """Joined tensors `[N, K]` in float64, without their tensor scales."""
  parts = [
    np.asarray(formats.dequantize(one, level), np.float64)
    / np.asarray(one.tensor_scale)
    for one in layer
  ]
  return np.concatenate(parts)


def in_order(values, sources, columns):
  """Columns of `[N, C]` brought from the kernel's order to that of x."""
  places = (np.asarray(sources)[:, None] * 4 + np.arange(4)).reshape(-1)
  out = np.zeros(values.shape, np.float64)
  out[:, places] = values
  assert not out[:, columns:].any()
  return out[:, :columns]


class NumpyInstructions:
  """What the instructions of `ptx` that decode do to numpy integers."""

  @staticmethod
  def _half(x):
    return np.ascontiguousarray(x, np.uint32).view(np.float16)

  @classmethod
  def _bits(cls, halves):
    return np.asarray(halves, np.float16).view(np.uint32)

  @staticmethod
  def const(x):
    return np.uint32(x)

  def and_(self, a, b):
    return a & np.uint32(b)

  def or_(self, a, b):
    return a | np.uint32(b)

  def and_or(self, a, b, c):
    return (a & np.uint32(b)) | np.uint32(c)

  def shl(self, a, b):
    return a << np.uint32(b)

  def shr(self, a, b):
    return a >> np.uint32(b)

  def _pairwise(self, f, *args):
    shape = np.broadcast_shapes(*(np.shape(a) for a in args))
    args = [self._half(np.broadcast_to(a, shape)) for a in args]
    exact = f(*(a.astype(np.float64) for a in args))
    rounded = exact.astype(np.float16)
    assert (rounded == exact).all(), "not exact in float16"
    return self._bits(rounded)

  def mul_half2(self, a, b):
    return self._pairwise(lambda x, y: x * y, a, b)

  def add_half2(self, a, b):
    return self._pairwise(lambda x, y: x + y, a, b)

  def fma_half2(self, a, b, c):
    return self._pairwise(lambda x, y, z: x * y + z, a, b, c)

  def max_half2(self, a, b):
    return self._pairwise(np.maximum, a, b)

  def permute(self, a, b, selector):
    out = np.zeros_like(a)
    for n in range(4):
      index = (selector >> (4 * n)) & 7
      source = a if index < 4 else np.uint32(b)
      byte = (source >> np.uint32(8 * (index & 3))) & np.uint32(255)
      out |= byte << np.uint32(8 * n)
    return out

  def e4m3_to_half2(self, x):
    low = np.ascontiguousarray(x.astype(np.uint16)).view(np.uint8)
    decoded = formats.decode_e4m3(jnp.asarray(low).view(jnp.float8_e4m3fn))
    return self._bits(np.asarray(decoded, np.float16))


@pytest.fixture
def instructions(monkeypatch):
  numpy_instructions = NumpyInstructions()
  for name in dir(NumpyInstructions):
    if not name.startswith("_"):
      module = mlir if hasattr(mlir, name) else ptx
      monkeypatch.setattr(module, name, getattr(numpy_instructions, name))


def kernel_view(weight, level, exponent):
  """The weight `[L, N, K]` as the kernel multiplies it, by numpy."""
  units = np.asarray(weight.units).swapaxes(2, 3)
  layers, _, tiles, steps = units.shape[:4]
  units = units.reshape(layers, -1, steps, UNIT_WORDS)
  words = units[..., :128].reshape(*units.shape[:3], 32, 4)
  scale = np.ascontiguousarray(units[..., 128:]).view(np.uint16)
  scales = decode.decode_scales(scale.astype(np.uint32))
  per_slice = steps // weight.slices
  out = np.zeros((*units.shape[:3], 4, 4, 32, 2), np.float16)
  for step in range(steps):
    part, at = divmod(step, per_slice)
    kind, lane_words = 0, None
    if weight.offsets is not None and level >= 6:
      kind = 2 if at < weight.doubles else 1
      kind = 0 if at >= weight.doubles + weight.singles else kind
      if kind:
        raw = np.asarray(weight.offsets)[:, :, part].view(np.uint8)
        begin = 64 * tiles * (at + min(at, weight.doubles))
        raw = raw[..., begin : begin + 64 * kind * tiles]
        raw = np.ascontiguousarray(raw).reshape(layers, -1, 64 * kind)
        lane_words = raw.view({1: np.uint16, 2: np.uint32}[kind])
        lane_words = lane_words.astype(np.uint32)
    for kk in range(4):
      pairs = decode.decode_pairs(words[:, :, step, :, kk])
      if kk < kind:
        pairs = decode.refine_pairs(pairs, lane_words, kk, exponent)
      for n, pair in enumerate(pairs):
        scaled = ptx.mul_half2(pair, scales[n % 2][:, :, step])
        out[:, :, step, kk, n] = NumpyInstructions._half(scaled).reshape(
          *scaled.shape, 2
        )
  # L, tiles, steps, kk, pair, half, r, quad, b
  out = out.reshape(*out.shape[:4], 2, 2, 8, 4, 2)
  out = out.transpose(0, 1, 5, 6, 2, 7, 3, 4, 8)
  out = out.reshape(layers, out.shape[1] * 16, -1)
  return out[:, : weight.rows].astype(np.float64) * decode.EPILOGUE


@pytest.mark.parametrize("slices", [1, 3, 4])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("decoding", ["exponent", "fixed"])
@pytest.mark.parametrize("level", [4, 6])
def test_kernel_decodes_what_the_format_says(
  instructions, slices, tiles, decoding, level
):
  rng = np.random.default_rng(slices)
  # Two tensors a layer; layers refine different numbers of subgroups.
  layers = []
  for rho in (0.2, 0.05):
    first = make(rng, 24, 1120, decoding=decoding, rho=rho)
    layers.append(
      [first, dataclasses.replace(first, tensor_scale=jnp.ones(()))]
    )
  packed = prepack(
    layers, packing=Packing(tiles=tiles, slices=slices, max_rows=16)
  )
  actual = kernel_view(packed, level, decoding == "exponent")
  for number, layer in enumerate(layers):
    values = in_order(actual[number], packed.sources[number], 1120)
    np.testing.assert_allclose(
      values, dequantized(layer, level), rtol=1e-6, atol=0
    )


@given(
  seed=st.integers(0, 2**32 - 1),
  shape=st.sampled_from([(1, 16), (40, 240), (33, 1120)]),
  decoding=st.sampled_from(["exponent", "fixed"]),
  most=st.lists(st.integers(0, 2), min_size=1, max_size=3),
  tiles=st.integers(1, 3),
  slices=st.integers(1, 3),
)
@settings(max_examples=10, deadline=None)
def test_unpacking_gives_back_ragged_layers(
  seed, shape, decoding, most, tiles, slices
):
  """Layers refine none to all that they may; no size divides another."""
  rng = np.random.default_rng(seed)
  n, k = shape
  layers = [
    [random_weight(rng, n, k, most=count, decoding=decoding)] for count in most
  ]
  packing = Packing(tiles=tiles, slices=slices, max_rows=16)
  packed = prepack(layers, packing=packing)
  for number, layer in enumerate(layers):
    for level in (4, 6):
      values = unpack_layer(packed, jnp.asarray(number), level)
      values = in_order(
        np.asarray(values, np.float64),
        packed.sources[number],
        layer[0].columns,
      )
      np.testing.assert_allclose(
        values, dequantized(layer, level), rtol=1e-6, atol=0
      )


def test_a_layer_without_refinement_has_the_same_bits_at_both_levels():
  rng = np.random.default_rng(0)
  layers = [[make(rng, 32, 256, rho=rho)] for rho in (0.0, 0.5)]
  packed = prepack(layers)
  assert packed.doubles + packed.singles > 0
  base, refined = (
    np.asarray(unpack_layer(packed, jnp.asarray(0), level)) for level in (4, 6)
  )
  np.testing.assert_array_equal(base, refined)


def test_tensors_that_do_not_belong_together_are_refused():
  rng = np.random.default_rng(0)
  one, other = make(rng, 16, 64), make(rng, 16, 128)
  with pytest.raises(QTensorError, match="columns: 64 and 128 in layer 1"):
    prepack([[one], [other]])
  with pytest.raises(QTensorError, match="outputs"):
    prepack([[one], [one, one]])
  with pytest.raises(QTensorError, match="fp6g has no form"):
    prepack([[make(rng, 16, 64, "fp6g")]])


def test_steps_follow_the_mask():
  mask = np.zeros((1, 4 * 32), bool)
  mask[0, :8] = [1, 0, 0, 1, 0, 1, 0, 0]
  order = column_order(mask, 2)
  assert (order.doubles, order.singles) == (1, 0)
  np.testing.assert_array_equal(order.sources[0, :4], [0, 3, 1, 2])
  np.testing.assert_array_equal(np.sort(order.sources[0]), np.arange(128))
  # The second group is the first of the other slice.
  np.testing.assert_array_equal(order.sources[0, 64:68], [5, 4, 6, 7])


def test_three_refined_subgroups_of_a_group_are_refused():
  mask = np.ones((1, 64), bool)
  with pytest.raises(QTensorError, match="more than two"):
    column_order(mask, 1)
