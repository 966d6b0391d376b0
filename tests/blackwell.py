"""Runs the body of a Blackwell kernel on numpy, in place of Mosaic.

Copies, products and barriers have the meaning that PTX gives them, and as much
freedom as it leaves: `late` ones happen no sooner than somebody waits for them,
the others at once. A body that reads too early, or fills a slot too early, gets
wrong numbers in one of the two.
"""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E2M1 = np.concatenate([E2M1, -E2M1])
POISON = 0xA5


class Ref:
  """A view of memory; `[...]` reads and writes, `.at[...]` is a smaller one."""

  def __init__(self, array):
    self.array = array

  @property
  def at(self):
    return SimpleIndexer(lambda index: Ref(self._view(index)))

  @property
  def T(self):  # noqa: N802
    return Ref(self.array.T)

  def __getitem__(self, index):
    return np.array(self._view(index))

  def __setitem__(self, index, value):
    self._view(index)[...] = value

  def _view(self, index):
    """Numpy's, but refuses what lies outside, which numpy would cut off."""
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(map(_plain, index))
    for one, size in zip(index, self.array.shape, strict=False):
      if isinstance(one, slice):
        assert 0 <= one.start < one.stop <= size, (one, size)
      elif one is not ...:
        assert 0 <= one < size, (one, size)
    return self.array[index]


def _plain(index):
  if hasattr(index, "size") and hasattr(index, "start"):
    return slice(int(index.start), int(index.start) + index.size)
  return index if index is ... else int(index)


@dataclasses.dataclass
class SimpleIndexer:
  make: Any

  def __getitem__(self, index):
    return self.make(index)


class Barrier:
  """Events that have been started; a phase is over after some of them."""

  def __init__(self, arrivals):
    self.arrivals, self.events = arrivals, []

  def wait(self):
    assert len(self.events) >= self.arrivals, "waits for ever"
    for event in self.events[: self.arrivals]:
      event()
    del self.events[: self.arrivals]


class Barriers:
  def __init__(self, arrivals, count):
    self.all = [Barrier(arrivals) for _ in range(count)]

  @property
  def at(self):
    return SimpleIndexer(lambda index: self.all[int(index)])


class Event:
  """Something that happens once, when it is called first."""

  def __init__(self, action, late):
    self.action = action
    if not late:
      self()

  def __call__(self):
    action, self.action = self.action, lambda: None
    action()


class Blackwell:
  """What a kernel's module finds under the names `plgpu`, `pl` and `lax`.

  Args:
    late_copies: To shared memory.
    late_products: And copies to tensor memory, which the same unit does.
  """

  def __init__(self, late_copies: bool, late_products: bool):
    self.late_copies, self.late_products = late_copies, late_products

  @contextlib.contextmanager
  def replaced_in(self, module):
    """Puts this machine into a module."""
    names = ("plgpu", "pl", "lax", "jnp")
    kept = {name: getattr(module, name) for name in names}
    self.real = kept["plgpu"]
    fakes = (self, Primitives(self), Primitives(self), Numpy())
    try:
      for name, fake in zip(names, fakes, strict=True):
        setattr(module, name, fake)
      yield self
    finally:
      for name, real in kept.items():
        setattr(module, name, real)

  # What describes a kernel.

  def __getattr__(self, name):
    if name in ("CompilerParams", "LoweringSemantics", "TMEMLayout", "Layout"):
      return getattr(self.real, name)
    raise AttributeError(name)

  def SMEM(self, shape, dtype, transforms=()):  # noqa: N802
    del transforms
    return lambda: Ref(_memory(shape, dtype))

  def TMEM(self, shape, dtype, layout=None):  # noqa: N802
    if layout is None:
      return lambda: Ref(_memory(shape, dtype))
    # Scales lie in tensor memory as in shared memory.
    rows, groups = shape
    atoms = (rows // 128, groups // 4, 32, 16)
    return lambda: Ref(_memory(atoms, dtype))

  def Barrier(self, num_arrivals, num_barriers=1, **_):  # noqa: N802
    if num_barriers == 1:
      return lambda: Barrier(num_arrivals)
    return lambda: Barriers(num_arrivals, num_barriers)

  def kernel(self, body, *, out_type, grid, grid_names, scratch_types, **_):
    def run(*operands):
      refs = [Ref(_stored(operand)) for operand in operands]
      out = Ref(np.full(out_type.shape, np.nan, np.float32))
      for place in itertools.product(*map(range, grid)):
        self.place = dict(zip(grid_names, place, strict=True))
        self.tensor_queue, self.stores = [], []
        scratch = [make() for make in scratch_types]
        body(*refs, out, *scratch)
        for one in scratch:
          left = getattr(one, "all", [one])
          assert not any(getattr(barrier, "events", ()) for barrier in left)
        assert not self.stores, "ends before its result is written"
      return jnp.asarray(out.array)

    return run

  # What a kernel does.

  def copy_gmem_to_smem(self, source, destination, barrier):
    assert source.array.shape == destination.array.shape

    def copy():
      destination.array[...] = source.array

    barrier.events.append(Event(copy, self.late_copies))

  def barrier_wait(self, barrier):
    barrier.wait()

  def async_copy_scales_to_tmem(self, source, destination):
    def copy():
      destination.array[...] = source.array

    self._in_order(copy)

  def transpose_ref(self, ref, axes):
    return Ref(ref.array.transpose(axes))

  def tcgen05_mma(self, acc, a, b, barrier, *, a_scale, b_scale, accumulate):
    def multiply():
      left = decoded(a.array, a_scale.array)
      right = decoded(b.array.T, b_scale.array)
      before = acc.array if accumulate else 0
      acc.array[...] = before + left @ right.T

    barrier.events.append(self._in_order(multiply))

  def _in_order(self, action):
    """The tensor core does one thing after the other."""
    event = Event(action, self.late_products)
    self.tensor_queue.append(event)
    earlier = list(self.tensor_queue)

    def finish():
      for one in earlier:
        one()

    return finish

  def async_load_tmem(self, ref, layout):
    del layout
    return ref.array.copy()

  def commit_smem(self):
    pass

  def copy_smem_to_gmem(self, source, destination):
    def copy():
      destination.array[...] = source.array

    self.stores.append(copy)

  def wait_smem_to_gmem(self, left):
    while len(self.stores) > left:
      self.stores.pop(0)()


def _memory(shape, dtype):
  """Codes a byte each and scales as stored; floats as wide as sums."""
  itemsize = jnp.dtype(dtype).itemsize
  if itemsize == 1:
    return np.full(shape, POISON & 15 if "4_" in str(dtype) else POISON, "u1")
  return np.full(shape, np.nan, np.float64)


def _stored(operand):
  array = np.asarray(operand)
  return array.view(np.uint8) if array.dtype.itemsize == 1 else array


def decoded(codes, atoms):
  """Scaled values of `[R, 64 A]` codes and the scales' bytes `[1, A, 32, 16]`.

  By PTX's description of `scale_vec::4X`: row r has the scales of its four
  groups in lane r % 32, bytes 4 * (r // 32) and on.
  """
  rows, columns = codes.shape
  row, group = np.ogrid[:rows, : columns // 16]
  byte = 4 * (row // 32) + group % 4
  scale = E4M3[atoms[0, group // 4, row % 32, byte]]
  return E2M1[codes] * np.repeat(scale, 16, axis=1)


def _e4m3(byte):
  sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
  if byte & 127 == 127:
    return np.nan
  value = (8 * (exponent > 0) + mantissa) * 2.0 ** (max(exponent, 1) - 10)
  return -value if sign else value


E4M3 = np.array([_e4m3(byte) for byte in range(256)])


class Primitives:
  """`pl` and `lax`."""

  def __init__(self, machine):
    self.machine = machine

  def axis_index(self, name):
    return self.machine.place[name]

  def ds(self, start, size):
    return SimpleNamespace(start=start, size=size)

  def when(self, condition):
    def run(body):
      if condition:
        body()

    return run

  def fori_loop(self, first, end, body, carry):
    assert carry is None
    for step in range(int(first), int(end)):
      body(step, None)

  def rem(self, a, b):
    return a % b

  def broadcast_in_dim(self, x, shape, axes):
    (axis,) = axes
    wide = [1, 1]
    wide[axis] = -1
    return np.broadcast_to(x.reshape(wide), shape)

  def bitcast_convert_type(self, codes, dtype):
    """Two 4-bit codes of a byte, the lower bits first."""
    assert jnp.dtype(dtype) == jnp.float4_e2m1fn
    codes = np.asarray(codes)
    return np.stack([codes & 15, codes >> 4], axis=-1)


class Numpy:
  """`jnp` where it computes."""

  def __getattr__(self, name):
    numpy = ("minimum", "maximum", "where")
    return getattr(np if name in numpy else jnp, name)
