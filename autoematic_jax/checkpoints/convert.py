"""Converting a model file to a packed checkpoint, one layer at a time."""

import contextlib
import dataclasses
import datetime
import errno
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

import autoematic_jax
from autoematic_jax import formats
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import orbax_io
from autoematic_jax.checkpoints.atomic import atomic_directory
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.checkpoints.source import open_source
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.models import registry
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.config import TensorSpec
from autoematic_jax.policy import PolicyConfig

_DENSE_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
  """What a checkpoint is made as.

  Attributes:
    format: `autofp6`, `autofp8`, `nvfp4`, `fp6g`, `bf16` or `fp32`.
    rho: Share of weight subgroups that are refined (autofp6, autofp8).
    decoding: Step of the offsets, `exponent` or `fixed`.
    levels: Levels that the checkpoint offers; None takes those of the format.
    dense_dtype: Of tensors that are not quantized, `bfloat16` or `float32`;
      None takes float32 for fp32 and bfloat16 otherwise.
  """

  format: str = "autofp6"
  rho: float = 0.2
  decoding: formats.Decoding = "exponent"
  levels: tuple[int, ...] | None = None
  dense_dtype: str | None = None

  def __post_init__(self):
    if self.format not in layout.FORMATS:
      raise PrecisionError(
          f"format {self.format!r} is unknown; known:"
          f" {', '.join(layout.FORMATS)}"
      )
    if self.decoding not in ("exponent", "fixed"):
      raise PrecisionError(f"{self.decoding=} must be 'exponent' or 'fixed'")
    if not 0 <= self.rho <= 0.5:
      raise PrecisionError(f"rho={self.rho} must be in [0, 0.5]")
    held = formats.LEVELS.get(self.format, ())
    levels = layout.DEFAULT_LEVELS[self.format]
    levels = levels if self.levels is None else tuple(self.levels)
    if not set(levels) <= set(held) or list(levels) != sorted(set(levels)):
      raise PrecisionError(
          f"levels {levels} must be ascending and out of {held}, which"
          f" {self.format} holds"
      )
    if held and not levels:
      raise PrecisionError("at least one level is needed")
    object.__setattr__(self, "levels", levels)
    dense = self.dense_dtype
    if dense is None or self.format in layout.DENSE_FORMATS:
      dense = "float32" if self.format == "fp32" else "bfloat16"
    if dense not in _DENSE_DTYPES:
      raise PrecisionError(
          f"dense_dtype {dense!r} must be one of {', '.join(_DENSE_DTYPES)}"
      )
    object.__setattr__(self, "dense_dtype", dense)


def convert(
    source: str | Path,
    destination: str | Path,
    options: ConvertOptions = ConvertOptions(),
    *,
    force: bool = False,
    progress: bool = True,
) -> layout.Sizes:
  """Converts a GGUF file or a safetensors folder.

  Weights are rounded to nearest; refined subgroups are those of largest
  squared error. Memory stays near the largest group of tensors that share an
  input. The destination appears only when it is complete.

  Args:
    source: What to read.
    destination: Directory to write.
    options: Format and its parameters.
    force: Whether to replace an existing destination.
    progress: Whether to show a progress bar.

  Returns:
    Sizes of what was written.

  Raises:
    CheckpointError: The source is damaged or incomplete, the destination
      exists, or the disk is full.
    UnsupportedModelError: The model is not handled.
    NonFiniteError: A weight holds NaN or Inf.
  """
  destination = Path(destination)
  if destination.exists() and not force:
    raise CheckpointError(f"{destination} already exists; --force replaces it")
  opened = open_source(source)
  config = registry.config_from_hf(opened.config)
  specs = registry.tensor_specs(config)
  check_tensors(opened, specs)
  with _disk_errors(destination), atomic_directory(
      destination, force=force
  ) as folder:
    return _Writer(opened, config, specs, options, folder).write(progress)


def check_tensors(source: Source, specs: dict[str, TensorSpec]) -> None:
  """Compares a source's tensors with what its config describes.

  Raises:
    CheckpointError: Names tensors that are missing, left over or misshapen.
  """
  missing = sorted(set(specs) - source.names)
  if missing:
    raise CheckpointError(
        f"{source.description} lacks {len(missing)} tensors:"
        f" {', '.join(missing[:3])}"
    )
  extra = sorted(
      name for name in source.names - set(specs) if not _harmless(name)
  )
  if extra:
    raise CheckpointError(
        f"{source.description} has {len(extra)} tensors that its config does"
        f" not describe: {', '.join(extra[:3])}"
    )
  for name, spec in specs.items():
    if source.shape(name) != spec.shape:
      raise CheckpointError(
          f"{name} has shape {list(source.shape(name))}; the config describes"
          f" {list(spec.shape)}"
      )


def _harmless(name):
  """Left-overs that say nothing new; a tied model's head is its embedding."""
  return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


@contextlib.contextmanager
def _disk_errors(destination):
  """Turns a full disk, however it is reported, into one clear line."""
  try:
    yield
  except CheckpointError:
    raise
  except (OSError, ValueError) as error:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left" in str(error):
      raise CheckpointError(
          f"the disk is full while writing {destination}; nothing was kept"
      ) from error
    if isinstance(error, OSError):
      raise CheckpointError(f"cannot write {destination}: {error}") from error
    raise


class _Writer:
  """Writes one checkpoint into an empty directory."""

  def __init__(self, source, config, specs, options, folder):
    self.source: Source = source
    self.config: ModelConfig = config
    self.specs: dict[str, TensorSpec] = specs
    self.options: ConvertOptions = options
    self.folder: Path = folder
    self.entries: dict[str, Any] = {}
    self.dense_bytes = 0
    self.weights = {"quantized": 0, "dense": 0}

  def write(self, progress: bool) -> layout.Sizes:
    """Converts every tensor, then writes tokenizer and metadata."""
    parameters = sum(int(np.prod(s.shape)) for s in self.specs.values())
    with tqdm(
        total=4 * parameters // 10**6,
        unit="MB",
        desc="converting",
        disable=not progress,
    ) as bar:
      rest = [n for n in self.specs if not n.startswith("model.layers.")]
      self._write_item(layout.REST, "", rest, bar)
      for layer in range(self.config.num_layers):
        prefix = layout.layer_prefix(layer)
        names = [n for n in self.specs if n.startswith(prefix)]
        self._write_item(layout.layer_item(layer), prefix, names, bar)
    for name, content in self.source.tokenizer_files().items():
      (self.folder / name).write_bytes(content)
    sizes = layout.Sizes(
        disk_bytes=layout.directory_bytes(self.folder / layout.WEIGHTS),
        dense_bytes=self.dense_bytes,
        quantized_weights=self.weights["quantized"],
        dense_weights=self.weights["dense"],
    )
    metadata = json.dumps(self._metadata(sizes), indent=1)
    (self.folder / layout.METADATA).write_text(metadata + "\n")
    return sizes

  def _write_item(self, item, prefix, names, bar):
    tensors = {}
    for group in _groups(names, self.specs):
      bar.set_postfix_str(group[0].removesuffix(".weight"))
      tensors.update(self._convert_group(group))
      bar.update(
          sum(4 * int(np.prod(self.specs[n].shape)) for n in group) // 10**6
      )
    orbax_io.save_item(
        self.folder / layout.WEIGHTS / item,
        {
            name.removeprefix(prefix): layout.arrays_of(tensor)
            for name, tensor in tensors.items()
        },
    )
    for name, tensor in tensors.items():
      self._count(name, tensor)

  def _count(self, name, tensor):
    entry = layout.describe(tensor)
    self.entries[name] = entry
    self.weights[entry["kind"]] += int(np.prod(self.specs[name].shape))
    if entry["kind"] == "dense":
      self.dense_bytes += tensor.nbytes

  def _convert_group(self, names) -> dict[str, layout.Tensor]:
    """Tensors that share an input, or one dense tensor."""
    values = {name: self.source.read(name) for name in names}
    for name, array in values.items():
      formats.check_finite(name, array)
    spec = self.specs[names[0]]
    options = self.options
    if spec.kind == "dense" or options.format in layout.DENSE_FORMATS:
      dtype = _DENSE_DTYPES[options.dense_dtype]
      return {name: array.astype(dtype) for name, array in values.items()}
    weights = {name: jnp.asarray(array) for name, array in values.items()}
    mask = self._shared_mask(list(weights.values()))
    return {
        name: formats.quantize_weight(
            weight,
            format=options.format,
            rho=options.rho,
            decoding=options.decoding,
            refinement_mask=mask,
        )
        for name, weight in weights.items()
    }

  def _shared_mask(self, weights):
    options = self.options
    if options.format not in ("autofp6", "autofp8"):
      return None
    gain = sum(
        np.asarray(
            formats.refinement_gain(
                weight, format=options.format, decoding=options.decoding
            ),
            np.float64,
        )
        for weight in weights
    )
    budget = formats.refinement_budget(weights[0].shape[1], options.rho)
    return formats.select_refinement_mask(gain, budget)

  def _metadata(self, sizes) -> dict[str, Any]:
    options = self.options
    policy = None
    if options.levels:
      policy = PolicyConfig(levels=options.levels).to_dict()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "format_version": layout.FORMAT_VERSION,
        "format": options.format,
        "decoding": options.decoding,
        "rho": options.rho,
        "levels": list(options.levels),
        "model": self.config.to_dict(),
        "policy": policy,
        "made": {
            "source": self.source.description,
            "method": "round to nearest, masks by squared error",
            "autoematic_jax": autoematic_jax.__version__,
            "time": now.isoformat(timespec="seconds"),
        },
        "sizes": dataclasses.asdict(sizes),
        "stored_bits": sizes.stored_bits,
        "tensors": self.entries,
    }


def _groups(names, specs):
  """Names in order, those of one input group together."""
  groups: dict[str, list[str]] = {}
  for name in names:
    groups.setdefault(specs[name].input_group or name, []).append(name)
  return list(groups.values())
