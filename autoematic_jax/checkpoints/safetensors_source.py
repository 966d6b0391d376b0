"""Hugging Face folders: config.json, safetensors, tokenizer files."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from autoematic_jax.checkpoints.source import Source
from autoematic_jax.errors import CheckpointError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

_LARGEST_HEADER = 100 << 20


class SafetensorsSource(Source):
  """A folder as `save_pretrained` writes it, read by its index.

  Raises:
    CheckpointError: A file is missing, truncated or not what it says.
  """

  def __init__(self, folder: Path):
    self.folder = folder
    self.config = read_json(folder / "config.json")
    if "quantization_config" in self.config:
      method = self.config["quantization_config"].get("quant_method")
      raise CheckpointError(
          f"{folder} is already quantized (quant_method {method!r}); only"
          " bf16, fp16 and fp32 folders can be converted"
      )
    self.description = f"Hugging Face folder {folder.resolve().name}"
    self._tensors = {}
    for file in self._files():
      for name, entry in _read_header(file).items():
        self._tensors[name] = (file, entry)
    self._check_index()

  def _files(self):
    index = self.folder / "model.safetensors.index.json"
    if index.exists():
      self._index = read_json(index).get("weight_map", {})
      files = [self.folder / name for name in sorted(set(self._index.values()))]
    else:
      self._index = None
      files = [self.folder / "model.safetensors"]
    for file in files:
      if not file.exists():
        named = " (named by the index)" if self._index is not None else ""
        raise CheckpointError(f"{file} is missing{named}")
    return files

  def _check_index(self):
    for name, file in (self._index or {}).items():
      if name not in self._tensors or self._tensors[name][0].name != file:
        raise CheckpointError(
            f"the index places {name} in {file}, which does not hold it"
        )

  @property
  def names(self) -> set[str]:
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    return self._tensors[name][1]["shape"]

  def read(self, name: str) -> np.ndarray:
    file, entry = self._tensors[name]
    if entry["dtype"] not in _DTYPES:
      raise CheckpointError(
          f"{name} in {file.name} is {entry['dtype']}; handled:"
          f" {', '.join(_DTYPES)}"
      )
    mapped = np.memmap(
        file,
        dtype=_DTYPES[entry["dtype"]],
        mode="r",
        offset=entry["start"],
        shape=entry["shape"],
    )
    return np.asarray(mapped, np.float32)

  def tokenizer_files(self) -> dict[str, bytes]:
    found = {
        name: (self.folder / name).read_bytes()
        for name in _TOKENIZER_FILES
        if (self.folder / name).exists()
    }
    if "generation_config.json" not in found:
      keys = ("bos_token_id", "eos_token_id", "pad_token_id")
      ids = {k: self.config[k] for k in keys if self.config.get(k) is not None}
      found["generation_config.json"] = json.dumps(ids).encode()
    return found


def read_json(path: Path) -> dict[str, Any]:
  """A JSON object from a file.

  Raises:
    CheckpointError: The file is missing or holds no JSON object.
  """
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise CheckpointError(f"{path} is missing") from None
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{path} cannot be read: {error}") from error
  if not isinstance(data, dict):
    raise CheckpointError(f"{path} does not hold a JSON object")
  return data


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
  """Dtype, shape and offset of every tensor of a safetensors file."""
  size = file.stat().st_size
  with file.open("rb") as stream:
    prefix = stream.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
    if length > min(size - 8, _LARGEST_HEADER):
      raise CheckpointError(
          f"{file} is truncated or not safetensors: {size} bytes, a header of"
          f" {length}"
      )
    try:
      header = json.loads(stream.read(length))
    except ValueError as error:
      raise CheckpointError(f"{file} has a damaged header: {error}") from error
  tensors = {}
  for name, entry in header.items():
    if name != "__metadata__":
      tensors[name] = _checked_entry(file, name, entry, size - 8 - length)
      tensors[name]["start"] += 8 + length
  return tensors


def _checked_entry(file, name, entry, data_bytes):
  """Entry of one tensor, its byte range checked against the file."""
  shape = tuple(entry["shape"])
  start, end = entry["data_offsets"]
  if end > data_bytes:
    raise CheckpointError(
        f"{file} is truncated: {name} ends at byte {end} of"
        f" {data_bytes} bytes of data"
    )
  dtype = entry["dtype"]
  if dtype in _DTYPES and end - start != (
      math.prod(shape) * _DTYPES[dtype].itemsize
  ):
    raise CheckpointError(
        f"{file}: {name} of shape {shape} and dtype {dtype} has"
        f" {end - start} bytes"
    )
  return {"dtype": dtype, "shape": shape, "start": start}
