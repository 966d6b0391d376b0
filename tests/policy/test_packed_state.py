"""The policy's state as one array."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from autoematic_jax import policy


def test_every_field_survives():
  state = policy.start_decode(policy.PolicyConfig(), 3)
  fields = dataclasses.fields(state)
  filled = dataclasses.replace(
    state,
    **{
      field.name: jnp.asarray([n, 0, n + 2]).astype(
        getattr(state, field.name).dtype
      )
      for n, field in enumerate(fields)
    },
  )
  packed = policy.pack(filled)
  assert packed.shape == (len(fields), 3)
  for field in fields:
    was = getattr(filled, field.name)
    now = getattr(policy.unpack(packed), field.name)
    assert now.dtype == was.dtype
    np.testing.assert_array_equal(now, was)
