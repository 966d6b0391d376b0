"""The formats once more, in float64 by search over tables of values.

Written from the definitions, and sharing nothing with the package.
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M3 = np.array(
  [i / 8 for i in range(16)]
  + [2 + i / 4 for i in range(8)]
  + [4 + i / 2 for i in range(8)]
)
E4M3 = np.array(
  [m * 2.0**-9 for m in range(8)]
  + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
)[:127]


def nearest(x, table):
  """Nearest value of a table of magnitudes, ties to the even index."""
  x = np.asarray(x, np.float64)
  flat = np.abs(x).ravel()
  high = np.clip(np.searchsorted(table, flat), 1, len(table) - 1)
  low = high - 1
  up, down = table[high] - flat, flat - table[low]
  index = np.where(up < down, high, low)
  index = np.where((up == down) & (high % 2 == 0), high, index)
  return (np.sign(x).ravel() * table[index]).reshape(x.shape)


def exponent(q):
  """Exponent of an E2M1 value, 0 below 2."""
  return np.select([np.abs(q) >= 4, np.abs(q) >= 2], [2, 1], 0)


def step(q, decoding, bits):
  """Value of one offset of 6 or 8 bits."""
  unit = np.full(np.shape(q), 2.0 ** (-3 if bits == 6 else -5))
  return unit if decoding == "fixed" else unit * 2.0 ** exponent(q)


def best_offset(scaled, q, decoding, bits):
  """Offset of least error, the smaller |d| among equals."""
  candidates = range(-2, 2) if bits == 6 else range(-8, 8)
  best = np.zeros(np.shape(q), int)
  least = np.abs(scaled - q)
  for d in sorted(candidates, key=abs):
    error = np.abs(scaled - q - d * step(q, decoding, bits))
    best = np.where(error < least, d, best)
    least = np.minimum(error, least)
  return best


def scales(w, largest, minimum):
  """Tensor scale in float32, and group scales of a padded matrix."""
  amax = np.abs(w).max()
  tensor = np.float32(amax) / np.float32(largest * 448) if amax else 1.0
  groups = np.abs(w).reshape(len(w), -1, 16).max(axis=2)
  group = nearest(groups / (largest * np.float64(tensor)), E4M3)
  return tensor, np.where(groups == 0, 1, np.maximum(group, minimum))


def pad(w):
  """Float64, zero-padded to a whole group."""
  return np.pad(np.asarray(w, np.float64), ((0, 0), (0, -w.shape[1] % 16)))


def quantize(w, *, largest=6.0, table=E2M1, minimum=2.0**-4):
  """Padded elements over their scale, their base and the whole scale."""
  w = pad(w)
  tensor, group = scales(w, largest, minimum)
  scale = np.repeat(group, 16, axis=1) * np.float64(tensor)
  scaled = w / scale
  return scaled, nearest(scaled, table), scale
