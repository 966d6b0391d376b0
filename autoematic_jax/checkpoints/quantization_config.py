"""What a quantized Hugging Face folder says about its weights."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from autoematic_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLayout:
  """Names and conventions of one producer of NVFP4 weights.

  Attributes:
    producer: For messages.
    codes: Suffix of the packed codes, after the module's name and a dot.
    tensor_scale: Suffix of the scale of a tensor.
    reciprocal: Whether that is what weights are divided by.
    input_scale: Suffix of the scale of a module's inputs.
    packed: Whether the config says that a module is quantized, by its name.
  """

  producer: str
  codes: str
  tensor_scale: str
  reciprocal: bool
  input_scale: str
  packed: Callable[[str], bool]

  group_scale = "weight_scale"
  """Suffix of the E4M3 scales, the same for all."""


def read_layout(config: Mapping[str, Any], source: str) -> PackedLayout:
  """The layout that a quantization config describes.

  Args:
    config: `quantization_config` of `config.json`, or `quantization` of
      `hf_quant_config.json`.
    source: Name of the folder, for messages.

  Returns:
    The layout.

  Raises:
    CheckpointError: It is anything but NVFP4 by ModelOpt or compressed-tensors,
      or says something that is not handled.
  """
  method = config.get("quant_method", "modelopt")
  if method == "modelopt":
    return _modelopt(config, source)
  if method == "compressed-tensors":
    return _compressed_tensors(config, source)
  raise CheckpointError(
    f"{source} is already quantized (quant_method {method!r}); of quantized"
    " folders, NVFP4 by modelopt or compressed-tensors can be converted"
  )


def _modelopt(config, source):
  algorithm = config.get("quant_algo")
  if algorithm == "MIXED_PRECISION":
    layers = config.get("quantized_layers") or {}
    others = {
      name: entry.get("quant_algo")
      for name, entry in layers.items()
      if entry.get("quant_algo") != "NVFP4"
    }
    if others or not layers:
      first = ", ".join(f"{n} ({a})" for n, a in sorted(others.items())[:3])
      raise CheckpointError(
        f"{source} has {len(others)} layers that are not NVFP4:"
        f" {first or 'it lists none'}; only NVFP4 and unquantized ones are"
        " handled"
      )
    packed = layers.__contains__
  elif algorithm == "NVFP4":
    excluded = config.get("exclude_modules", config.get("ignore")) or []
    packed = _all_but(excluded, fnmatch.fnmatchcase)
  else:
    raise CheckpointError(
      f"{source} is quantized by ModelOpt as {algorithm!r}; handled: 'NVFP4'"
    )
  size = config.get("group_size", 16)
  if size != 16:
    raise CheckpointError(f"{source} has group_size {size}; handled: 16")
  return PackedLayout(
    producer="ModelOpt NVFP4",
    codes="weight",
    tensor_scale="weight_scale_2",
    reciprocal=False,
    input_scale="input_scale",
    packed=packed,
  )


_PACK_FORMAT = "nvfp4-pack-quantized"
_WEIGHTS = {
  "num_bits": 4,
  "type": "float",
  "group_size": 16,
  "strategy": "tensor_group",
  "symmetric": True,
}


def _compressed_tensors(config, source):
  groups = config.get("config_groups") or {}
  found = {config.get("format")} | {
    group["format"] for group in groups.values() if group.get("format")
  }
  if found != {_PACK_FORMAT}:
    raise CheckpointError(
      f"{source} is quantized by compressed-tensors as"
      f" {', '.join(sorted(map(repr, found)))}; handled: {_PACK_FORMAT!r} alone"
    )
  for name, group in groups.items():
    weights = group.get("weights") or {}
    for key, value in _WEIGHTS.items():
      if weights.get(key, value) != value:
        raise CheckpointError(
          f"{source}: {name} has weights with {key}={weights[key]!r}; handled:"
          f" {value!r}"
        )
    if group.get("targets") != ["Linear"]:
      raise CheckpointError(
        f"{source}: {name} has targets {group.get('targets')!r}; handled:"
        " ['Linear']"
      )
  for name in ("sparsity_config", "transform_config"):
    if config.get(name):
      raise CheckpointError(f"{source} has a {name}, which is not handled")
  return PackedLayout(
    producer="compressed-tensors NVFP4",
    codes="weight_packed",
    tensor_scale="weight_global_scale",
    reciprocal=True,
    input_scale="input_global_scale",
    packed=_all_but(config.get("ignore") or [], _matches),
  )


def _all_but(patterns, matches):
  return lambda name: not any(matches(name, pattern) for pattern in patterns)


def _matches(name, pattern):
  """A name, or a regular expression that starts with `re:`."""
  if pattern.startswith("re:"):
    return re.match(pattern[3:], name) is not None
  return name == pattern
