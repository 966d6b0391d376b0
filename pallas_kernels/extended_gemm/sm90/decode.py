"""Decoding of packed weights in registers, in pairs of float16.

`prepack.py` says where the bits lie. The tests run these functions on numpy
integers.
"""

from collections.abc import Sequence
from typing import Any

from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90 import ptx

Bits = Any
"""A 32-bit value of the kernel; numpy integers in tests."""

EPILOGUE = 128.0
"""Decoded weights carry 2^-14 * 2^7, to stay in float16's range."""


def decode_scale_pair(bytes_: Bits) -> Bits:
  """The two low bytes, E4M3, as a pair of float16, times 2^7."""
  return ptx.mul_half2(ptx.e4m3_to_half2(bytes_), mlir.const(0x58005800))


def decode_scales(bytes_: Bits) -> tuple[Bits, Bits]:
  """Two E4M3 scales (row, row + 8), each twice as float16, times 2^7."""
  both = decode_scale_pair(bytes_)
  return ptx.permute(both, 0, 0x1010), ptx.permute(both, 0, 0x3232)


def decode_pairs(word: Bits) -> list[Bits]:
  """Eight E2M1 values times 2^-14: (row, row + 8) by the two column pairs."""
  # Two shifts bring the other four codes to where the first four lie.
  moved = mlir.or_(
    mlir.and_(mlir.shr(word, 3), 0x0E0E0E0E),
    mlir.and_(mlir.shl(word, 7), 0x80808080),
  )
  return [
    mlir.and_(word, 0x8E008E00),
    mlir.and_(mlir.shl(word, 8), 0x8E008E00),
    ptx.permute(moved, 0, 0x2404),
    mlir.and_(moved, 0xFF00FF00),
  ]


def refine_pairs(
  pairs: Sequence[Bits], offsets: Bits, word: int, exponent: bool
) -> list[Bits]:
  """Adds `d / 8`, times 2^e of the value by the exponent decoding.

  The mma's operand order is that of `decode_pairs`. Two bits d + 2 of each
  element lie in the low byte of each half, the first pair's highest.

  Args:
    pairs: Of one word, by `decode_pairs`.
    offsets: Two bytes a refined word of the step.
    word: Which of the step's refined words, 0 or 1.
    exponent: Whether the step grows with the value's exponent.

  Returns:
    The refined pairs.
  """
  factors = _factors(pairs, offsets, word, exponent)
  return [
    ptx.fma_half2(eighths, step, pair)
    for (eighths, step), pair in zip(factors, pairs, strict=True)
  ]


def offset_pairs(
  pairs: Sequence[Bits], offsets: Bits, word: int, exponent: bool
) -> list[Bits]:
  """What `refine_pairs` adds to its pairs."""
  factors = _factors(pairs, offsets, word, exponent)
  return [ptx.mul_half2(eighths, step) for eighths, step in factors]


def _factors(pairs, offsets, word, exponent):
  """For each pair `d / 8` and the step, times 2^-14, that it multiplies."""
  spread = ptx.permute(offsets, 0, 0x4140 if word == 0 else 0x4342)
  out = []
  for n, pair in enumerate(pairs):
    # 0.5 + (d + 2) / 8, less 0.75.
    shifted = mlir.shl(spread, 2 + 2 * n)
    eighths = ptx.and_or(shifted, 0x03000300, 0x38003800)
    eighths = ptx.add_half2(eighths, mlir.const(0xBA00BA00))
    # 2^-14 is the step below 2; an exponent field above it raises the step.
    step = mlir.const(0x04000400)
    if exponent:
      step = ptx.max_half2(mlir.and_(pair, 0x0C000C00), step)
    out.append((eighths, step))
  return out


def scale_pairs(pairs: Sequence[Bits], scales: tuple[Bits, Bits]) -> list[Bits]:
  """Pairs of one word times the scales of their rows."""
  return [ptx.mul_half2(p, scales[n % 2]) for n, p in enumerate(pairs)]
