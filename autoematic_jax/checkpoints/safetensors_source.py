"""Hugging Face folders: config.json, safetensors, tokenizer files."""

import json
import math
import re
import struct
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from autoematic_jax.checkpoints.json_files import read_json
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.errors import CheckpointError

_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Parts of packed weights.
_RAW_DTYPES = {
  **_DTYPES,
  "U8": np.dtype(np.uint8),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}

_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")

_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
)

_LARGEST_HEADER = 100 << 20
"""Bytes; what the safetensors format allows."""


class _Tensor(NamedTuple):
  """Where a tensor lies; `dtype` is the header's, `start` a file offset."""

  file: Path
  dtype: str
  shape: tuple[int, ...]
  start: int


class SafetensorsSource(Source):
  """A folder as `save_pretrained` writes it, read by its index.

  Raises:
    CheckpointError: A file is missing, truncated or not what it says.
  """

  def __init__(self, folder: Path):
    self.config = read_json(folder / "config.json")
    self.description = f"Hugging Face folder {folder.resolve().name}"
    self._folder = folder
    index = folder / "model.safetensors.index.json"
    if index.exists():
      self._tensors = _indexed_tensors(folder, index)
    else:
      self._tensors = _read_header(folder / "model.safetensors")

  @property
  def names(self) -> set[str]:
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    return self._tensors[name].shape

  def dtype(self, name: str) -> np.dtype:
    tensor = self._tensors[name]
    if tensor.dtype not in _DTYPES:
      raise CheckpointError(
        f"{name} in {tensor.file.name} has dtype {tensor.dtype}; handled:"
        f" {', '.join(_DTYPES)}"
      )
    return _DTYPES[tensor.dtype]

  def stored_dtype(self, name: str) -> str:
    """A tensor's dtype as the file names it."""
    return self._tensors[name].dtype

  def read(self, name: str) -> np.ndarray:
    self.dtype(name)
    return self.raw(name)

  def raw(self, name: str) -> np.ndarray:
    """A tensor as it is stored, bytes and 8-bit floats too.

    Raises:
      CheckpointError: Its dtype is none of those.
    """
    tensor = self._tensors[name]
    if tensor.dtype not in _RAW_DTYPES:
      raise CheckpointError(
        f"{name} in {tensor.file.name} has dtype {tensor.dtype}; handled:"
        f" {', '.join(_RAW_DTYPES)}"
      )
    return np.memmap(
      tensor.file,
      dtype=_RAW_DTYPES[tensor.dtype],
      mode="r",
      offset=tensor.start,
      shape=tensor.shape,
    )

  def tokenizer_files(self) -> dict[str, bytes]:
    found = {
      name: (self._folder / name).read_bytes()
      for name in _TOKENIZER_FILES
      if (self._folder / name).exists()
    }
    if "generation_config.json" not in found:
      keys = ("bos_token_id", "eos_token_id", "pad_token_id")
      ids = {k: self.config[k] for k in keys if self.config.get(k) is not None}
      found["generation_config.json"] = json.dumps(ids).encode()
    return found


def _indexed_tensors(folder: Path, index: Path) -> dict[str, _Tensor]:
  """The tensors that an index names, each from the shard it names."""
  places = read_json(index).get("weight_map")
  if not isinstance(places, dict) or not places:
    raise CheckpointError(f"{index} has no weight_map")
  headers = {
    file: _read_header(folder / file, f" (named by {index.name})")
    for file in sorted(set(map(str, places.values())))
  }
  stray = sorted(
    file.name
    for file in folder.iterdir()
    if _SHARD.fullmatch(file.name) and file.name not in headers
  )
  if stray:
    raise CheckpointError(
      f"{folder} holds shards that {index.name} does not name:"
      f" {', '.join(stray[:3])}; remove them if they are of another conversion"
    )
  tensors = {}
  for name, file in places.items():
    if name not in headers[str(file)]:
      raise CheckpointError(
        f"{index.name} places {name} in {file}, which does not hold it"
      )
    tensors[name] = headers[str(file)][name]
  return tensors


def _read_header(file: Path, why: str = "") -> dict[str, _Tensor]:
  """Every tensor of a safetensors file, checked against the file's length."""
  try:
    size = file.stat().st_size
    with file.open("rb") as stream:
      prefix = stream.read(8)
      length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
      if length > min(size - 8, _LARGEST_HEADER):
        raise CheckpointError(
          f"{file} is truncated or not safetensors: {size} bytes cannot hold a"
          f" header of {length}"
        )
      text = stream.read(length)
  except FileNotFoundError:
    raise CheckpointError(f"{file} is missing{why}") from None
  except OSError as error:
    raise CheckpointError(f"{file} cannot be read: {error}") from error
  try:
    header = json.loads(text)
    return {
      name: _tensor(file, name, entry, 8 + length, size)
      for name, entry in header.items()
      if name != "__metadata__"
    }
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise CheckpointError(
      f"{file} has a damaged header: {type(error).__name__}: {error}"
    ) from error


def _tensor(file, name, entry, data_start, size):
  """One header entry."""
  dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
  start, end = map(int, entry["data_offsets"])
  if end > size - data_start:
    raise CheckpointError(
      f"{file} is truncated: {name} ends at byte {end} of"
      f" {size - data_start} bytes of data"
    )
  known = dtype in _RAW_DTYPES
  if start < 0 or (
    known and end - start != math.prod(shape) * _RAW_DTYPES[dtype].itemsize
  ):
    raise CheckpointError(
      f"{file}: {name} is {dtype}{list(shape)} but lies at bytes {start} to"
      f" {end}"
    )
  return _Tensor(file, dtype, shape, data_start + start)
