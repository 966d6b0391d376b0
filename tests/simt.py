"""Runs a kernel's body on numpy, every thread of every block at once.

A value is an array [blocks, threads]. Loads and stores check their bounds;
threads that a condition leaves out touch nothing.
"""

import contextlib
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_SPACE = 1 << 40
"""Addresses from one operand to the next."""


class Machine:
  """Memory and threads; `mlir`, `ptx` and `scalars` stand in for the modules.

  Attributes:
    arrays: Operands in device memory, in the order of the kernel's.
    shared: Words of shared memory, `[blocks, words]`.
  """

  def __init__(self, arrays, blocks, threads, shared_words=1):
    self.arrays = [np.ascontiguousarray(array) for array in arrays]
    self.shape = blocks, threads
    self.shared = np.full((blocks, shared_words), np.nan, np.float32)
    self.active = np.ones(self.shape, bool)
    self.mlir = self._namespace("mlir")
    self.ptx = self._namespace("ptx")
    self.scalars = types.SimpleNamespace(run=self._scalars)

  @property
  def refs(self):
    """What a body takes: operands, then shared memory."""
    return list(range(len(self.arrays) + 1))

  def _namespace(self, prefix):
    names = [name for name in dir(self) if name.startswith(prefix + "_")]
    return types.SimpleNamespace(
      **{name.removeprefix(prefix + "_"): getattr(self, name) for name in names}
    )

  def _full(self, value, dtype=np.uint32):
    return np.broadcast_to(np.asarray(value, dtype), self.shape)

  def _word(self, value):
    if isinstance(value, int):
      return self._full(value % 2**32)
    return value

  def _scalars(self, function, *values):
    out = jax.tree.leaves(function(*map(jnp.asarray, values)))
    return [np.asarray(one) for one in out]

  # mlir

  def mlir_const(self, value):
    return self._full(value % 2**32)

  def mlir_const_f32(self, value):
    return self._full(value, np.float32)

  def mlir_zero_f32(self):
    return self.mlir_const_f32(0.0)

  def mlir_add(self, a, b):
    return self._word(a) + self._word(b)

  def mlir_sub(self, a, b):
    return self._word(a) - self._word(b)

  def mlir_mul(self, a, b):
    return self._word(a) * self._word(b)

  def mlir_div(self, a, b):
    return a // np.uint32(b)

  def mlir_rem(self, a, b):
    return a % np.uint32(b)

  def mlir_shl(self, a, b):
    return a << np.uint32(b)

  def mlir_shr(self, a, b):
    return a >> np.uint32(b)

  def mlir_and_(self, a, b):
    return a & self._word(b)

  def mlir_or_(self, a, b):
    return a | self._word(b)

  def mlir_sub_f32(self, a, b):
    return a - b

  def mlir_max_f32(self, a, b):
    return np.maximum(a, b)

  def mlir_as_f32(self, bits):
    return np.ascontiguousarray(bits).view(np.float32)

  def mlir_loop(self, count, carried, body):
    before, carried = self.active, list(carried)
    count = self._word(count)
    for i in range(int(count[before].max(initial=0))):
      self.active = before & (i < count)
      after = body(self.mlir_const(i), list(carried))
      carried = [
        np.where(self.active, new, old)
        for new, old in zip(after, carried, strict=True)
      ]
    self.active = before
    return carried

  def mlir_less(self, a, b):
    return a < self._word(b)

  def mlir_equal(self, a, b):
    return a == self._word(b)

  def mlir_both(self, a, b):
    return a & b

  def mlir_select(self, condition, a, b):
    return np.where(condition, a, b)

  def mlir_minimum(self, a, b):
    return np.minimum(a, self._word(b))

  def mlir_add_f32(self, a, b):
    return a + b

  def mlir_mul_f32(self, a, b):
    return a * b

  def mlir_div_f32(self, a, b):
    return a / b

  def mlir_global_address(self, ref):
    return self._full((ref + 1) * _SPACE, np.int64)

  def mlir_shared_address(self, ref):
    return self._full(0)

  def mlir_offset(self, address, elements, size=1):
    return address + elements.astype(np.int64) * size

  def mlir_add_wide(self, address, size):
    return address + size

  def mlir_when(self, condition, body):
    before = self.active
    self.active = before & condition
    body()
    self.active = before

  # ptx

  def ptx_special(self, name):
    blocks, threads = self.shape
    if name == "tid.x":
      return self._full(np.arange(threads)[None])
    assert name == "ctaid.x"
    return self._full(np.arange(blocks)[:, None])

  def _place(self, address, size):
    """The one operand that an access goes to, and bytes into it."""
    wanted = address[self.active]
    (number,) = set((wanted // _SPACE).tolist())
    array = self.arrays[number - 1].reshape(-1).view(np.uint8)
    at = address - number * _SPACE
    inside = at[self.active]
    assert (inside % size == 0).all(), "misaligned"
    assert (inside >= 0).all(), "before the operand"
    assert (inside + size <= len(array)).all(), "past the operand"
    return array, np.where(self.active, at, 0)

  def _load(self, address, count, dtype):
    words = np.zeros((*self.shape, count), dtype)
    everyone = self.active
    for number in np.unique(address[everyone] // _SPACE):
      self.active = everyone & (address // _SPACE == number)
      array, at = self._place(address, 4 * count)
      spread = at[self.active][:, None] + np.arange(4 * count)
      words[self.active] = np.ascontiguousarray(array[spread]).view(dtype)
    self.active = everyone
    return tuple(words[..., n] for n in range(count))

  def _store(self, address, values):
    array, at = self._place(address, 4 * len(values))
    raw = np.ascontiguousarray(np.stack(values, axis=-1)).view(np.uint8)
    spread = at[..., None] + np.arange(4 * len(values))
    array[spread[self.active]] = raw[self.active]

  def ptx_load_global(self, address):
    return self._load(address, 1, np.uint32)[0]

  def ptx_load_global4_f32(self, address):
    return self._load(address, 4, np.float32)

  def ptx_load_global2(self, address):
    return self._load(address, 2, np.uint32)

  def ptx_load_global4(self, address):
    return self._load(address, 4, np.uint32)

  def ptx_load_global_f32(self, address):
    return self._load(address, 1, np.float32)[0]

  def ptx_load_global8(self, address):
    array, at = self._place(address, 1)
    return array[at].astype(np.uint32)

  def ptx_store_global2(self, address, values):
    self._store(address, values)

  def ptx_store_global(self, address, value):
    self._store(address, [np.asarray(value).astype(np.uint32)])

  def ptx_store_global8(self, address, value):
    array, at = self._place(address, 1)
    array[at[self.active]] = np.asarray(value)[self.active].astype(np.uint8)

  def ptx_store_global4_f32(self, address, values):
    self._store(address, [np.asarray(v, np.float32) for v in values])

  def ptx_store_global_f32(self, address, value):
    self._store(address, [np.asarray(value, np.float32)])

  def ptx_store_shared_f32(self, address, value):
    self.ptx_store_shared4_f32(address, [value])

  def ptx_store_shared4_f32(self, address, values, at=0):
    blocks = np.broadcast_to(np.arange(self.shape[0])[:, None], self.shape)
    for n, value in enumerate(values):
      place = (address + at) // 4 + n
      value = np.broadcast_to(value, self.shape)
      self.shared[blocks[self.active], place[self.active]] = value[self.active]

  def ptx_load_shared_f32(self, address, at=0):
    return self._shared(address, at)

  def ptx_load_shared4_f32(self, address, at=0):
    return tuple(self._shared(address, at + 4 * n) for n in range(4))

  def _shared(self, address, at):
    place = np.where(self.active, (address + at) // 4, 0)
    return self.shared[np.arange(self.shape[0])[:, None], place]

  def ptx_from_lane(self, value, distance):
    return value[:, np.arange(self.shape[1]) ^ distance]

  def ptx_ballot(self, condition):
    lanes = condition.reshape(self.shape[0], -1, 32)
    bits = (lanes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1)
    return np.repeat(bits.astype(np.uint32), 32, axis=1)

  def ptx_block_barrier(self):
    some = self.active.any(axis=1)
    together = self.active.all(axis=1) == some
    assert together.all(), "a barrier that not all threads of a block reach"

  def ptx_fma(self, a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float32)

  def ptx_rsqrt(self, x):
    return (1 / np.sqrt(x)).astype(np.float32)

  def ptx_exp2(self, x):
    return np.exp2(x).astype(np.float32)

  def ptx_permute(self, a, b, selector):
    both = np.stack([self._full(a), self._word(b)], axis=-1)
    source = np.ascontiguousarray(both).view(np.uint8)
    picked = [source[..., (selector >> (4 * n)) & 7] for n in range(4)]
    return _words(np.stack(picked, axis=-1))

  def ptx_mul_half2(self, a, b):
    return _words(_halves(a) * _halves(b))

  def ptx_half2_to_f32(self, pair):
    return tuple(np.moveaxis(_halves(pair).astype(np.float32), -1, 0))

  def ptx_e4m3_to_half2(self, bytes_):
    pair = np.ascontiguousarray(bytes_).view(np.uint8).reshape(*self.shape, 4)
    stored = pair[..., :2].copy().view(ml_dtypes.float8_e4m3fn)
    return _words(stored.astype(np.float16))

  def _warps(self, values):
    """`[blocks, warps, 8, 4, ...]` by lane."""
    return values.reshape(self.shape[0], -1, 8, 4, *values.shape[2:])

  def ptx_transpose_8x8(self, pair):
    matrix = self._warps(_halves(pair))
    matrix = matrix.reshape(*matrix.shape[:2], 8, 8).swapaxes(2, 3)
    return _words(matrix.reshape(*self.shape, 2))

  def ptx_mma_16x8x16(self, acc, a, b):
    a = self._warps(np.stack([_halves(self._full(x)) for x in a], axis=2))
    b = self._warps(np.stack([_halves(self._full(x)) for x in b], axis=2))
    # Lane (row, column) holds registers (half of K, half of the rows), pairs.
    left = a.reshape(*a.shape[:4], 2, 2, 2)
    left = np.einsum("nwrckhp->nwhrkcp", left)
    left = left.reshape(*left.shape[:2], 16, 16).astype(np.float64)
    right = np.einsum("nwrckp->nwkcpr", b)
    right = right.reshape(*right.shape[:2], 16, 8).astype(np.float64)
    out = (left @ right).reshape(*left.shape[:2], 2, 8, 4, 2)
    out = np.einsum("nwhrcp->nwrchp", out).reshape(*self.shape, 4)
    return [
      (np.asarray(old, np.float64) + out[..., n]).astype(np.float32)
      for n, old in enumerate(acc)
    ]

  def ptx_half2(self, low, high):
    return _words(np.stack([low, high], axis=-1).astype(np.float16))


def _halves(pair):
  """Float16 pairs, along a last axis."""
  pair = np.ascontiguousarray(pair, np.uint32)
  return pair.view(np.float16).reshape(*pair.shape, 2)


def _words(parts):
  """32-bit words of what lies along the last axis."""
  return np.ascontiguousarray(parts).view(np.uint32)[..., 0]


@contextlib.contextmanager
def replaced(monkeypatch, machine, *modules):
  """Lets modules run on the machine."""
  with monkeypatch.context() as patch:
    for module in modules:
      for name in ("mlir", "ptx", "scalars"):
        if hasattr(module, name):
          patch.setattr(module, name, getattr(machine, name))
    with np.errstate(all="ignore"):
      yield
