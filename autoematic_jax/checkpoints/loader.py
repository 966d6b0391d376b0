"""Reading a converted checkpoint, one layer at a time."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoematic_jax import formats
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import orbax_io
from autoematic_jax.checkpoints.atomic import UNFINISHED
from autoematic_jax.checkpoints.json_files import read_json
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import QTensorError
from autoematic_jax.models import registry
from autoematic_jax.models.config import ModelConfig

_NEEDED = (
  "format",
  "decoding",
  "levels",
  "model",
  "items",
  "tensors",
  "stored_bits",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
  """A checkpoint whose weights are still on disk.

  Attributes:
    path: Its directory, which also holds the tokenizer.
    config: The model's config.
    metadata: All of `autoematic.json`.
  """

  path: Path
  config: ModelConfig
  metadata: dict[str, Any]

  @property
  def format(self) -> str:
    """Format of the projections."""
    return self.metadata["format"]

  @property
  def decoding(self) -> formats.Decoding:
    """Step of the offsets."""
    return self.metadata["decoding"]

  @property
  def levels(self) -> tuple[int, ...]:
    """Levels that it offers; empty when unquantized."""
    return tuple(self.metadata["levels"])

  @property
  def policy(self) -> dict[str, Any] | None:
    """Stored fields of the policy."""
    return self.metadata.get("policy")

  @property
  def stored_bits(self) -> float:
    """Bits on disk for each quantized weight."""
    return float(self.metadata["stored_bits"])

  @property
  def tokenizer_dir(self) -> Path:
    """Where tokenizer and chat template are."""
    return self.path

  def layer(self, layer: int) -> dict[str, layout.Tensor]:
    """Tensors of one layer by name relative to it."""
    return self._read(layout.layer_item(layer), layout.layer_prefix(layer))

  def rest(self) -> dict[str, layout.Tensor]:
    """Tensors outside the layers by full name."""
    return self._read(layout.REST, "")

  def tensors(self) -> Iterator[tuple[str, layout.Tensor]]:
    """Every tensor by full name; holds one layer at a time."""
    yield from self.rest().items()
    for layer in range(self.config.num_layers):
      for name, tensor in self.layer(layer).items():
        yield layout.layer_prefix(layer) + name, tensor

  def _read(self, item, prefix):
    """Tensors of one item.

    Raises:
      CheckpointError: The item is not what the metadata says.
      QTensorError: A tensor breaks its invariant.
    """
    entries = {
      name.removeprefix(prefix): entry
      for name, entry in self.metadata["tensors"].items()
      if (name.startswith(prefix) if prefix else layout.outside_layers(name))
    }
    arrays = orbax_io.restore_item(
      self.path / layout.WEIGHTS / item,
      {name: entry["arrays"] for name, entry in entries.items()},
      self.metadata["items"][item],
    )
    tensors = {n: layout.rebuild(e, arrays[n]) for n, e in entries.items()}
    for name, tensor in tensors.items():
      if isinstance(tensor, formats.QTensor):
        _validate(prefix + name, tensor)
    return tensors


def _validate(name, tensor):
  try:
    formats.validate_qtensor(tensor)
  except QTensorError as error:
    raise QTensorError(f"{name}: {error}") from error


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
  """Opens a directory that `convert` wrote.

  Raises:
    CheckpointError: It is not a finished checkpoint, was written by a newer
      version, or its metadata does not describe its model.
  """
  path = Path(path)
  if not path.exists():
    raise CheckpointError(f"{path} does not exist")
  if UNFINISHED.fullmatch(path.resolve().name):
    raise CheckpointError(f"{path} is an unfinished conversion")
  file = path / layout.METADATA
  if not file.exists():
    source = path.is_file() or (path / "config.json").exists()
    hint = "; it looks like a model: run autoematic convert on it"
    raise CheckpointError(
      f"{path} is not a converted checkpoint: it has no {layout.METADATA}"
      f"{hint if source else ''}"
    )
  metadata = read_json(file)
  _check_version(file, metadata.get("format_version"))
  missing = [key for key in _NEEDED if key not in metadata]
  if missing:
    raise CheckpointError(
      f"{file} lacks {', '.join(missing)}: convert the model again"
    )
  try:
    config = ModelConfig.from_dict(metadata["model"])
    _check_precision(file, metadata)
    _check_tensors(file, config, metadata)
    _check_items(file, config, metadata)
    float(metadata["stored_bits"])
  except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
    raise CheckpointError(
      f"{file} is damaged: {type(error).__name__}: {error}"
    ) from error
  return Checkpoint(path=path, config=config, metadata=metadata)


def _check_version(file, version):
  if version == layout.FORMAT_VERSION:
    return
  newer = isinstance(version, int) and version > layout.FORMAT_VERSION
  todo = "upgrade autoematic_jax" if newer else "convert the model again"
  raise CheckpointError(
    f"{file} has format_version {version!r}; this version of autoematic_jax"
    f" reads {layout.FORMAT_VERSION}: {todo}"
  )


def _check_precision(file, metadata):
  if metadata["format"] not in layout.FORMATS:
    raise CheckpointError(
      f"{file} has format {metadata['format']!r}; known:"
      f" {', '.join(layout.FORMATS)}"
    )
  if metadata["decoding"] not in ("fixed", "exponent"):
    raise CheckpointError(f"{file} has decoding {metadata['decoding']!r}")
  held = formats.LEVELS.get(metadata["format"], ())
  if not set(metadata["levels"]) <= set(held):
    raise CheckpointError(
      f"{file} offers levels {metadata['levels']}; {metadata['format']} holds"
      f" {list(held)}"
    )


def _check_tensors(file, config, metadata):
  """The metadata's tensors must be those of its model."""
  specs, entries = registry.tensor_specs(config), metadata["tensors"]
  if set(specs) != set(entries):
    difference = sorted(set(specs) ^ set(entries))
    raise CheckpointError(
      f"{file}: the model and the list of tensors disagree about"
      f" {', '.join(difference[:3])}"
    )
  for name, spec in specs.items():
    quantized = spec.kind == "linear" and (
      metadata["format"] not in layout.DENSE_FORMATS
    )
    wanted = (metadata["format"],) if quantized else ("dense",)
    found = _described(entries[name])
    if quantized:
      wanted += (metadata["decoding"],)
    wanted += (list(spec.shape),)
    if found != wanted:
      raise CheckpointError(
        f"{file}: {name} is described as {found}; the model needs {wanted}"
      )


def _check_items(file, config, metadata):
  items = [layout.layer_item(layer) for layer in range(config.num_layers)]
  found = {name: int(size) for name, size in metadata["items"].items()}
  if set(found) != {layout.REST, *items}:
    raise CheckpointError(
      f"{file} lists {len(found)} items; {config.num_layers} layers need"
      f" {len(items) + 1}"
    )


def _described(entry):
  """Format, decoding and logical shape of a metadata entry."""
  if entry["kind"] == "dense":
    return ("dense", entry["arrays"]["values"]["shape"])
  shape = [entry["arrays"]["codes"]["shape"][0], entry["columns"]]
  return (entry["format"], entry["decoding"], shape)
