"""Model files that can be converted, behind one interface."""

import abc
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
  def read(self, name: str) -> np.ndarray:
    """A tensor as float32 (or its own wider float)."""

  @abc.abstractmethod
  def tokenizer_files(self) -> dict[str, bytes]:
    """Tokenizer, chat template and generation config by file name."""


def open_source(path: str | Path) -> Source:
  """Opens a GGUF file or a Hugging Face safetensors folder.

  Raises:
    CheckpointError: The path is missing or is neither.
  """
  from autoematic_jax.checkpoints.gguf_source import GGUFSource
  from autoematic_jax.checkpoints.safetensors_source import SafetensorsSource

  path = Path(path)
  if not path.exists():
    raise CheckpointError(f"{path} does not exist")
  if path.is_dir():
    return SafetensorsSource(path)
  with path.open("rb") as file:
    magic = file.read(4)
  if magic == b"GGUF":
    return GGUFSource(path)
  raise CheckpointError(
      f"{path} is neither a GGUF file nor a folder with config.json and"
      " safetensors"
  )
