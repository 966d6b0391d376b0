import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from autoematic_jax import formats

PACKINGS = [
  (formats.pack_nibbles, formats.unpack_nibbles, 4),
  (formats.pack_pairs, formats.unpack_pairs, 2),
  (formats.pack_sextets, formats.unpack_sextets, 6),
]


def codes_of(bits):
  return npst.arrays(np.uint8, (2, 3, 16), elements=st.integers(0, 2**bits - 1))


@pytest.mark.parametrize(("pack", "unpack", "bits"), PACKINGS)
@given(st.data())
def test_codes_survive_packing(pack, unpack, bits, data):
  codes = data.draw(codes_of(bits))
  packed = jax.jit(pack)(codes)
  assert packed.shape == (2, 3, 16 * bits // 8)
  np.testing.assert_array_equal(jax.jit(unpack)(packed), codes)


def test_bytes_are_little_endian(run):
  nibbles = jnp.array([0x1, 0xA, 0xF, 0x0], jnp.uint8)
  assert run(formats.pack_nibbles, nibbles).tolist() == [0xA1, 0x0F]
  pairs = jnp.array([1, 2, 3, 0, 0, 0, 0, 3], jnp.uint8)
  assert run(formats.pack_pairs, pairs).tolist() == [0b00111001, 0b11000000]
  sextets = np.array([0b100001, 0b110010, 0b001111, 0b010101], np.uint8)
  word = sum(int(code) << (6 * i) for i, code in enumerate(sextets))
  expected = list(word.to_bytes(3, "little"))
  assert run(formats.pack_sextets, jnp.asarray(sextets)).tolist() == expected


def test_mask_puts_two_groups_in_a_byte(run):
  mask = np.zeros(12, bool)
  mask[[0, 3, 6, 9]] = True  # groups 1001, 0010 (low bit first), 0100
  packed = run(formats.pack_mask, jnp.asarray(mask))
  assert packed.tolist() == [0b0100_1001, 0b0000_0010]


@pytest.mark.parametrize("groups", [1, 2, 5, 8])
@given(st.data())
def test_masks_survive_packing(groups, data):
  mask = data.draw(npst.arrays(bool, (3, 4 * groups)))
  packed = jax.jit(formats.pack_mask)(mask)
  assert packed.shape == (3, -(-groups // 2))
  unpack = jax.jit(formats.unpack_mask, static_argnums=1)
  np.testing.assert_array_equal(unpack(packed, 4 * groups), mask)
