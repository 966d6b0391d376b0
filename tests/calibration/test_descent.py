"""Choosing groups again: never worse, and what the codes say."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from calibration.test_gptq import FORMATS
from calibration.test_gptq import factor_of
from calibration.test_gptq import loss
from calibration.test_gptq import problem

from autoematic_jax import formats
from autoematic_jax.calibration import GptqOptions
from autoematic_jax.calibration import descent
from autoematic_jax.calibration import gptq


def row_losses(tensor, w, h):
  error = np.asarray(formats.dequantize(tensor), np.float64) - w
  return np.einsum("nk,kl,nl->n", error, h, error)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_row_loses_less(fmt):
  w, h = problem(columns=60)
  factor = factor_of(h)
  options = GptqOptions(format=fmt, sweeps=0)
  once = gptq.quantize_jointly([w], factor, options)[0]
  again = gptq.quantize_jointly(
    [w], factor, dataclasses.replace(options, sweeps=3)
  )[0]
  formats.validate_qtensor(again)
  if fmt in formats.REFINED_FORMATS:
    np.testing.assert_array_equal(
      formats.mask_bits(once), formats.mask_bits(again)
    )
  damped = factor.damped.astype(np.float64)
  before, after = (row_losses(t, w, damped) for t in (once, again))
  assert np.all(after <= before * (1 + 1e-5))
  assert loss(again, w, h) < 0.97 * loss(once, w, h)


def test_blocks_are_those_of_the_hessian():
  _, h = problem(columns=48)
  blocks = descent.blocks_of(h)
  for index in range(3):
    part = slice(16 * index, 16 * (index + 1))
    np.testing.assert_allclose(
      blocks.inverses[index] @ h[part, part], np.eye(16), atol=1e-3
    )
    upper = blocks.uppers[index]
    np.testing.assert_array_equal(upper, np.triu(upper))
    np.testing.assert_allclose(
      upper.T @ upper, blocks.inverses[index], rtol=1e-3, atol=1e-4
    )


def test_what_is_lost_elsewhere_moves_the_mask():
  """A subgroup that costs more than all errors together is not refined."""
  w, h = problem(columns=32)
  factor = factor_of(h)
  options = GptqOptions(rho=0.25, sweeps=0)
  free = gptq.quantize_jointly([w], factor, options)[0]
  chosen = np.flatnonzero(np.asarray(formats.mask_bits(free)))
  costs = np.zeros(8)
  costs[chosen] = 1e9
  other = gptq.quantize_jointly([w], factor, options, loss=costs)[0]
  again = np.flatnonzero(np.asarray(formats.mask_bits(other)))
  assert len(again) == len(chosen) == 2
  assert not set(again) & set(chosen)


def test_the_number_of_refined_subgroups_can_be_given():
  w, h = problem(columns=64)
  tensor = gptq.quantize_jointly([w], factor_of(h), GptqOptions(), refined=7)[0]
  assert int(jnp.sum(formats.mask_bits(tensor))) == 7
