"""Model files that can be converted, behind one interface."""

import abc
import os
from pathlib import Path
from typing import Any

import numpy as np

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

  @abc.abstractmethod
  def tokenizer_files(self) -> dict[str, bytes]:
    """Tokenizer, chat template and generation config by file name."""


def open_source(path: str | os.PathLike[str]) -> Source:
  """Opens a GGUF file or a Hugging Face safetensors folder.

  Raises:
    CheckpointError: The path is missing, damaged, incomplete or neither.
    UnsupportedModelError: The file describes a model that is not handled.
  """
  # Imported here: each reader implements the class above.
  from autoematic_jax.checkpoints.gguf_source import GGUFSource
  from autoematic_jax.checkpoints.safetensors_source import SafetensorsSource

  path = Path(path)
  if path.is_dir():
    return SafetensorsSource(path)
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
