"""Opening a converted checkpoint and reading it layer by layer."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from autoematic_jax import formats
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import orbax_io
from autoematic_jax.checkpoints.safetensors_source import read_json
from autoematic_jax.errors import CheckpointError
from autoematic_jax.models import registry
from autoematic_jax.models.config import ModelConfig

_NEEDED = ("format", "decoding", "levels", "model", "tensors", "stored_bits")


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

  def _read(self, item, prefix):
    entries = {
        name.removeprefix(prefix): entry
        for name, entry in self.metadata["tensors"].items()
        if (name.startswith(prefix) if prefix else _outside_layers(name))
    }
    arrays = orbax_io.restore_item(
        self.path / layout.WEIGHTS / item,
        {name: entry["arrays"] for name, entry in entries.items()},
    )
    tensors = {}
    for name, entry in entries.items():
      tensors[name] = layout.rebuild(entry, arrays[name])
      if isinstance(tensors[name], formats.QTensor):
        formats.validate_qtensor(tensors[name])
    return tensors


def _outside_layers(name):
  return not name.startswith("model.layers.")


def load_checkpoint(path: str | Path) -> Checkpoint:
  """Opens a directory that `convert` wrote.

  Raises:
    CheckpointError: It is not a finished checkpoint, was written by a newer
      version, or its metadata does not describe its model.
  """
  path = Path(path)
  if not path.is_dir():
    raise CheckpointError(f"{path} is not a directory; see autoematic convert")
  if re.search(r"\.partial-\d+$", path.name):
    raise CheckpointError(f"{path} is an unfinished conversion")
  if not (path / layout.METADATA).exists():
    hint = ""
    if (path / "config.json").exists():
      hint = "; it looks like a model folder: run autoematic convert on it"
    raise CheckpointError(f"{path} has no {layout.METADATA}{hint}")
  metadata = read_json(path / layout.METADATA)
  version = metadata.get("format_version")
  if version != layout.FORMAT_VERSION:
    raise CheckpointError(
        f"{path} has checkpoint version {version}; this version of"
        f" autoematic_jax reads {layout.FORMAT_VERSION}: upgrade it or convert"
        " again"
    )
  missing = [key for key in _NEEDED if key not in metadata]
  if missing:
    raise CheckpointError(f"{path / layout.METADATA} lacks {missing}")
  config = ModelConfig.from_dict(metadata["model"])
  _check_shapes(path, config, metadata)
  return Checkpoint(path=path, config=config, metadata=metadata)


def _check_shapes(path, config, metadata):
  """The metadata's tensors must be those of its model."""
  specs, entries = registry.tensor_specs(config), metadata["tensors"]
  if set(specs) != set(entries):
    difference = sorted(set(specs) ^ set(entries))
    raise CheckpointError(
        f"{path / layout.METADATA} and its model disagree about tensors"
        f" {difference[:3]}"
    )
  for name, spec in specs.items():
    entry = entries[name]
    if entry["kind"] == "dense":
      found = tuple(entry["arrays"]["values"]["shape"])
    else:
      found = (entry["arrays"]["codes"]["shape"][0], entry["columns"])
    if found != spec.shape:
      raise CheckpointError(
          f"{name} has shape {list(found)} in {path / layout.METADATA}; the"
          f" model needs {list(spec.shape)}"
      )
