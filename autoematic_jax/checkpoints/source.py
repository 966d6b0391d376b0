"""Model files that can be converted, behind one interface."""

import abc
import os
from pathlib import Path
from typing import Any

import numpy as np

from autoematic_jax import formats
from autoematic_jax.checkpoints.json_files import read_json
from autoematic_jax.errors import CheckpointError


class Source(abc.ABC):
  """Tensors by Hugging Face name, read one at a time.

  Attributes:
    config: The model's config as a Hugging Face `config.json` has it.
    description: What it was read from, without folders.
  """

  config: dict[str, Any]
  description: str

  @property
  @abc.abstractmethod
  def names(self) -> set[str]:
    """Names of all tensors."""

  @abc.abstractmethod
  def shape(self, name: str) -> tuple[int, ...]:
    """Shape of a tensor, without reading it."""

  @abc.abstractmethod
  def dtype(self, name: str) -> np.dtype:
    """Floating dtype that `read` gives, without reading the tensor."""

  @abc.abstractmethod
  def read(self, name: str) -> np.ndarray:
    """The values of a tensor; nothing of it is kept.

    Raises:
      CheckpointError: The tensor is stored in a way that is not handled.
    """

  def packed(self, name: str) -> formats.QTensor | None:
    """A matrix that is NVFP4 already, or None where it is not.

    Raises:
      CheckpointError: Its scales are damaged.
    """
    del name
    return None

  @abc.abstractmethod
  def tokenizer_files(self) -> dict[str, bytes]:
    """Tokenizer, chat template and generation config by file name."""


def open_source(path: str | os.PathLike[str]) -> Source:
  """Opens a GGUF file or a Hugging Face folder, quantized or not.

  Raises:
    CheckpointError: The path is missing, damaged, incomplete or neither.
    UnsupportedModelError: The file describes a model that is not handled.
  """
  # Imported here: each reader implements the class above.
  from autoematic_jax.checkpoints.gguf_source import GGUFSource
  from autoematic_jax.checkpoints.packed_source import PackedSource
  from autoematic_jax.checkpoints.quantization_config import read_layout
  from autoematic_jax.checkpoints.safetensors_source import SafetensorsSource

  path = Path(path)
  if path.is_dir():
    quantization = _quantization(path)
    if quantization is None:
      return SafetensorsSource(path)
    return PackedSource(path, read_layout(quantization, path.resolve().name))
  try:
    with path.open("rb") as file:
      magic = file.read(4)
  except FileNotFoundError:
    raise CheckpointError(f"{path} does not exist") from None
  except OSError as error:
    raise CheckpointError(f"{path} cannot be read: {error}") from error
  if magic == b"GGUF":
    return GGUFSource(path)
  raise CheckpointError(
    f"{path} is neither a GGUF file nor a folder with config.json and"
    " safetensors"
  )


def _quantization(folder):
  """The quantization config of a folder, or None.

  ModelOpt keeps it in a file of its own, newer versions in both.
  """
  own = folder / "hf_quant_config.json"
  if own.exists():
    return read_json(own).get("quantization", {})
  return read_json(folder / "config.json").get("quantization_config") or None
