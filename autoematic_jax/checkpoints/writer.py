"""Quantizes a model and writes it, one layer at a time."""

import dataclasses
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from autoematic_jax import formats
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import orbax_io
from autoematic_jax.checkpoints import packed_weights
from autoematic_jax.checkpoints.options import ConvertOptions
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import TensorSpec

_DISTRIBUTIONS = (
  "autoematic_jax",
  "jax",
  "jaxlib",
  "ml_dtypes",
  "numpy",
  "orbax-checkpoint",
)


_ROUNDING = "round to nearest, masks by squared error"


class ModelWeights:
  """A model's tensors as a calibrator reads them, each from its file.

  Args:
    read: Gives a tensor by its Hugging Face name.
    specs: Every tensor of the model.
  """

  def __init__(
    self,
    read: Callable[[str], np.ndarray],
    specs: Mapping[str, TensorSpec],
  ):
    self._read = read
    self._specs = specs

  def tensor(self, name: str) -> np.ndarray:
    """A tensor by its full name, float32."""
    return self._read(name).astype(np.float32)

  def layer(
    self, number: int
  ) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Every tensor of a layer, and the matrices that read each of its inputs.

    Both by names relative to the layer.
    """
    prefix = layout.layer_prefix(number)
    names = [n for n in self._specs if n.startswith(prefix)]
    matrices = [name for name in names if self._specs[name].kind == "linear"]
    groups = {
      key.removeprefix(prefix): [name.removeprefix(prefix) for name in group]
      for key, group in _groups(matrices, self._specs).items()
    }
    weights = {n.removeprefix(prefix): self.tensor(n) for n in names}
    return weights, groups


@runtime_checkable
class Calibrator(Protocol):
  """Chooses the weights of one layer after the other on some text."""

  @property
  def method(self) -> str:
    """What the checkpoint says about how it was made."""
    ...

  def start(
    self, config: ModelConfig, weights: ModelWeights, options: ConvertOptions
  ) -> None:
    """Comes before the first layer."""
    ...

  def layer(self, number: int) -> Mapping[str, formats.QTensor]:
    """Packs the matrices of the next layer, by name relative to it."""
    ...


class Writer:
  """Writes one checkpoint into an empty directory.

  Args:
    source: The model's tensors, already compared with `specs`.
    config: The model's config.
    specs: Every tensor of the model.
    options: What the checkpoint is made as.
    folder: Where it is written.
    calibrator: Chooses the weights; None rounds them to nearest.
  """

  def __init__(
    self,
    source: Source,
    config: ModelConfig,
    specs: dict[str, TensorSpec],
    options: ConvertOptions,
    folder: Path,
    calibrator: Calibrator | None = None,
  ):
    self._source = source
    self._calibrator = calibrator
    self._config = config
    self._specs = specs
    self._options = options
    self._folder = folder
    self._entries: dict[str, dict[str, Any]] = {}
    self._item_bytes: dict[str, int] = {}
    self._dense_bytes = 0
    self._weights = {"quantized": 0, "dense": 0}
    self._kept = 0
    self._rounded = 0

  def write(self, progress: bool) -> layout.Sizes:
    """Converts every tensor, then writes tokenizer and metadata."""
    with tqdm(
      total=sum(self._source_bytes(name) for name in self._specs),
      unit="B",
      unit_scale=True,
      desc="converting",
      disable=not progress,
    ) as bar:
      rest = [n for n in self._specs if layout.outside_layers(n)]
      self._write_item(layout.REST, "", rest, bar)
      if self._calibrator is not None:
        bar.set_postfix_str("the calibration text")
        weights = ModelWeights(self._read, self._specs)
        self._calibrator.start(self._config, weights, self._options)
      for layer in range(self._config.num_layers):
        prefix = layout.layer_prefix(layer)
        names = [n for n in self._specs if n.startswith(prefix)]
        packed = None
        if self._calibrator is not None:
          bar.set_postfix_str(prefix.rstrip("."))
          packed = self._calibrator.layer(layer)
        self._write_item(layout.layer_item(layer), prefix, names, bar, packed)
    for name, content in self._source.tokenizer_files().items():
      (self._folder / name).write_bytes(content)
    sizes = layout.Sizes(
      disk_bytes=sum(self._item_bytes.values()),
      dense_bytes=self._dense_bytes,
      quantized_weights=self._weights["quantized"],
      dense_weights=self._weights["dense"],
    )
    metadata = json.dumps(self._metadata(sizes), indent=1)
    (self._folder / layout.METADATA).write_text(metadata + "\n")
    return sizes

  def _source_bytes(self, name):
    count = int(np.prod(self._specs[name].shape))
    return count * self._source.dtype(name).itemsize

  def _write_item(self, item, prefix, names, bar, packed=None):
    """Converts and writes the tensors of one layer, or those outside."""
    tensors: dict[str, layout.Tensor] = {
      prefix + name: tensor for name, tensor in (packed or {}).items()
    }
    bar.update(sum(map(self._source_bytes, tensors)))
    rounded = [name for name in names if name not in tensors]
    for group in _groups(rounded, self._specs).values():
      bar.set_postfix_str(group[0].removesuffix(".weight"), refresh=False)
      tensors.update(self._convert_group(group))
      bar.update(sum(self._source_bytes(name) for name in group))
    path = self._folder / layout.WEIGHTS / item
    orbax_io.save_item(
      path,
      {n.removeprefix(prefix): layout.arrays_of(t) for n, t in tensors.items()},
    )
    self._item_bytes[item] = layout.directory_bytes(path)
    for name, tensor in tensors.items():
      self._record(name, tensor)

  def _record(self, name, tensor):
    entry = layout.describe(tensor)
    self._entries[name] = entry
    self._weights[entry["kind"]] += int(np.prod(self._specs[name].shape))
    if entry["kind"] == "dense":
      self._dense_bytes += tensor.nbytes

  def _convert_group(self, names: list[str]) -> dict[str, layout.Tensor]:
    """Converts tensors that share an input, or one dense tensor."""
    options = self._options
    linear = self._specs[names[0]].kind == "linear"
    if not linear or options.format in layout.DENSE_FORMATS:
      return {
        # What needs no cast stays mapped, outside of our memory.
        name: self._read(name).astype(options.dense, copy=False)
        for name in names
      }
    found = {name: self._source.packed(name) for name in names}
    kept: dict[str, layout.Tensor] = {
      name: packed_weights.in_format(tensor, options.format, options.decoding)
      for name, tensor in found.items()
      if tensor is not None
    }
    rounded = [name for name in names if name not in kept]
    self._kept += len(kept)
    self._rounded += len(rounded)
    weights = [jnp.asarray(self._read(name), jnp.float32) for name in rounded]
    if not weights:
      return kept
    tensors = formats.quantize_weights(
      weights,
      format=cast(formats.Format, options.format),
      # One mask serves all that read an input, and a given base has none.
      rho=0.0 if kept else options.rho,
      decoding=options.decoding,
    )
    return {**kept, **dict(zip(rounded, tensors, strict=True))}

  def _method(self):
    """How the weights were chosen."""
    if self._calibrator is not None:
      return self._calibrator.method
    if not self._kept:
      return _ROUNDING
    method = f"the source's NVFP4 codes and scales in {self._kept} matrices"
    if self._rounded:
      method += f", {self._rounded} others rounded to nearest"
    if self._options.format in formats.REFINED_FORMATS:
      method += (
        "; the former have no offsets: above 4 bits they refine activations,"
        " keys and values only"
      )
    return method

  def _read(self, name):
    values = self._source.read(name)
    formats.check_finite(name, values)
    return values

  def _metadata(self, sizes) -> dict[str, Any]:
    options = self._options
    now = datetime.datetime.now(datetime.UTC)
    return {
      "format_version": layout.FORMAT_VERSION,
      "format": options.format,
      "decoding": options.decoding,
      "rho": options.rho,
      "levels": list(options.offered_levels),
      "dense_dtype": str(options.dense),
      "model": self._config.to_dict(),
      "policy": options.policy_dict(),
      "made": {
        "source": self._source.description,
        "method": self._method(),
        "time": now.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {
          name: importlib.metadata.version(name) for name in _DISTRIBUTIONS
        },
      },
      "sizes": dataclasses.asdict(sizes),
      "stored_bits": sizes.stored_bits,
      "items": self._item_bytes,
      "tensors": self._entries,
    }


def _groups(names, specs) -> dict[str, list[str]]:
  """Names in order, those of one input group together, by their group."""
  groups: dict[str, list[str]] = {}
  for name in names:
    groups.setdefault(specs[name].input_group or name, []).append(name)
  return groups
