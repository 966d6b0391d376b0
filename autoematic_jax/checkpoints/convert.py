"""Converting a model file to a packed checkpoint."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoematic_jax import formats
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints.atomic import atomic_directory
from autoematic_jax.checkpoints.atomic import check_destination
from autoematic_jax.checkpoints.options import ConvertOptions
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.checkpoints.source import open_source
from autoematic_jax.checkpoints.writer import Calibrator
from autoematic_jax.checkpoints.writer import Writer
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import PrecisionError
from autoematic_jax.models import registry
from autoematic_jax.models.config import TensorSpec


def convert(
  source_path: str | os.PathLike[str],
  destination: str | os.PathLike[str],
  *,
  format: str = "autofp6",
  rho: float = 0.2,
  decoding: formats.Decoding = "exponent",
  levels: Sequence[int] | None = None,
  dense_dtype: str | None = None,
  policy: Mapping[str, Any] | None = None,
  calibrator: Calibrator | None = None,
  force: bool = False,
  progress: bool = False,
) -> layout.Sizes:
  """Converts a GGUF file or a Hugging Face folder.

  Without a calibrator, weights are rounded to nearest, refined subgroups are
  those of largest squared error, alike for matrices that read the same input,
  and memory stays near the largest tensor. Weights that are NVFP4 already keep
  their codes and scales, and have no offsets. The destination appears only when
  it is complete.

  Args:
    source_path: What to read.
    destination: Directory to write.
    format: `autofp6`, `autofp8`, `nvfp4`, `fp6g`, `bf16` or `fp32`.
    rho: Share of weight subgroups that are refined (autofp6, autofp8).
    decoding: Step of the offsets, `exponent` or `fixed`.
    levels: Bits that layers may run at; None takes those of the format.
    dense_dtype: Of tensors that are not quantized, `bfloat16` (default) or
      `float32`.
    policy: Fields of `PolicyConfig` that differ from their defaults.
    calibrator: Chooses the weights of the layers, such as
      `autoematic_jax.calibration.Calibrator`.
    force: Whether to replace an existing checkpoint.
    progress: Whether to show a progress bar.

  Returns:
    Sizes of what was written.

  Raises:
    CheckpointError: The source is damaged or incomplete, the destination
      exists, or the disk is full.
    UnsupportedModelError: The model is not handled.
    NonFiniteError: A weight holds NaN or Inf.
    PrecisionError: The options do not fit together.
  """
  options = ConvertOptions(
    format=format,
    rho=rho,
    decoding=decoding,
    levels=None if levels is None else tuple(levels),
    dense_dtype=dense_dtype,
    policy=policy,
  )
  if calibrator is not None and format in layout.DENSE_FORMATS:
    raise PrecisionError(f"{format} weights are not rounded: no calibration")
  # A link is followed, so that what it names is replaced and not the link.
  target = Path(destination).resolve()
  check_destination(target, force=force, ours=layout.FILES)
  source = open_source(source_path)
  config = registry.config_from_hf(source.config)
  specs = registry.tensor_specs(config)
  check_tensors(source, specs)
  if calibrator is not None:
    _refuse_packed(source, specs)
  with _disk_errors(target), atomic_directory(target) as folder:
    writer = Writer(source, config, specs, options, folder, calibrator)
    return writer.write(progress)


def check_tensors(source: Source, specs: Mapping[str, TensorSpec]) -> None:
  """Compares a source's tensors with what its config describes.

  Raises:
    CheckpointError: Names tensors that are missing, left over, misshapen or
      of a dtype that is not handled.
  """
  missing = specs.keys() - source.names
  if missing:
    raise CheckpointError(f"{source.description} lacks {_listed(missing)}")
  extra = {n for n in source.names - specs.keys() if not _harmless(n, specs)}
  if extra:
    raise CheckpointError(
      f"{source.description} holds what its config does not describe:"
      f" {_listed(extra)}"
    )
  for name, spec in specs.items():
    if source.shape(name) != spec.shape:
      raise CheckpointError(
        f"{name} has shape {list(source.shape(name))}; the config describes"
        f" {list(spec.shape)}"
      )
    source.dtype(name)


def _refuse_packed(source, specs):
  linear = [name for name, spec in specs.items() if spec.kind == "linear"]
  packed = next((n for n in linear if source.packed(n) is not None), None)
  if packed is not None:
    raise PrecisionError(
      f"{source.description}: {packed} is NVFP4 already, so that calibration"
      " has nothing to choose; convert without --calibrate"
    )


def _listed(names):
  first = ", ".join(sorted(names)[:3])
  count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
  return f"{count}: {first}{', ...' if len(names) > 3 else ''}"


def _harmless(name, specs):
  """Left-overs that say nothing new; a tied model's head is its embedding."""
  tied = "lm_head.weight" not in specs and name == "lm_head.weight"
  return tied or name.endswith("rotary_emb.inv_freq")


@contextlib.contextmanager
def _disk_errors(destination: Path) -> Iterator[None]:
  """Turns a full disk, however it is reported, into one clear line."""
  try:
    yield
  except (OSError, ValueError) as error:
    # Orbax passes on what tensorstore raises: a ValueError.
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error):
      detail = f": {error.strerror}" if isinstance(error, OSError) else ""
      raise CheckpointError(
        f"the disk is full while writing {destination}{detail}; nothing of it"
        " was kept"
      ) from error
    if isinstance(error, OSError):
      raise CheckpointError(f"cannot write {destination}: {error}") from error
    raise
