"""GGUF files of the handled architectures, as Hugging Face tensors."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from autoematic_jax import formats
from autoematic_jax.checkpoints import gguf_config
from autoematic_jax.checkpoints import gguf_packed
from autoematic_jax.checkpoints import gguf_tokenizer
from autoematic_jax.checkpoints import packed_weights
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import UnsupportedModelError

_GLOBAL = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}

_LAYER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}

_ROPE_DIVISORS = "rope_freqs.weight"


class GGUFSource(Source):
  """A GGUF file; quantized tensors are dequantized by the gguf package.

  Raises:
    CheckpointError: The file is truncated or lacks something.
    UnsupportedModelError: The model is not a handled one.
  """

  def __init__(self, path: Path):
    self._gguf = _import_gguf()
    self._path = path
    self.description = f"GGUF file {path.name}"
    try:
      reader = self._gguf.GGUFReader(path)
      self._metadata = {k: f.contents() for k, f in reader.fields.items()}
    except Exception as error:  # The package raises whatever it stumbles on.
      raise CheckpointError(
        f"{path} is truncated or damaged: {type(error).__name__}: {error}"
      ) from error
    self._architecture = self._metadata.get("general.architecture")
    self._check_length(reader.tensors)
    self._check_kind()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    divisors = stored.pop(_ROPE_DIVISORS, None)
    self._scales = self._pop_scales(stored)
    self._tensors = {self._hf_name(n): tensor for n, tensor in stored.items()}
    self.config = gguf_config.hf_config(
      self._metadata,
      {name: self.shape(name) for name in self._tensors},
      None if divisors is None else self._values(divisors),
      path.name,
    )

  def _pop_scales(self, stored):
    """Scales of NVFP4 tensors, by the name of the weight.

    Those of inputs are dropped: activations are scaled token by token.
    """
    for name in [n for n in stored if n.endswith(".input_scale")]:
      del stored[name]
    return {
      name.removesuffix("scale") + "weight": stored.pop(name)
      for name in list(stored)
      if name.endswith(".scale")
    }

  def _check_length(self, tensors):
    size = self._path.stat().st_size
    for tensor in tensors:
      end = int(tensor.data_offset) + int(tensor.n_bytes)
      if end > size:
        raise CheckpointError(
          f"{self._path} is truncated: {tensor.name} ends at byte {end} of"
          f" {size}"
        )

  def _check_kind(self):
    handled = tuple(gguf_config.ARCHITECTURES)
    if self._architecture not in handled:
      raise UnsupportedModelError(
        f"{self._path.name}: GGUF architecture {self._architecture!r} is not"
        f" handled; handled: {', '.join(handled)}"
      )
    parts = self._metadata.get("split.count", 1)
    if parts > 1:
      raise UnsupportedModelError(
        f"{self._path.name} is one of {parts} parts; merge them into one file"
        " first (gguf-split --merge)"
      )

  def _hf_name(self, name):
    if name in _GLOBAL:
      return _GLOBAL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
      return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    raise UnsupportedModelError(
      f"{self._path.name}: tensor {name} is not handled for"
      f" {self._architecture}"
    )

  @property
  def names(self) -> set[str]:
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def dtype(self, name: str) -> np.dtype:
    return np.dtype(np.float32)

  def read(self, name: str) -> np.ndarray:
    tensor = self._tensors[name]
    values = self._values(tensor).reshape(self.shape(name))
    if tensor.name in self._scales:
      values = values * self._scale(tensor.name)
    return self._unpermuted(name, values)

  def packed(self, name: str) -> formats.QTensor | None:
    tensor = self._tensors[name]
    kind = tensor.tensor_type.name
    if kind not in ("NVFP4", "MXFP4") or len(self.shape(name)) != 2:
      return None
    stored = self._mapped(tensor).reshape(self.shape(name)[0], -1)
    scale = self._scale(tensor.name)
    if kind == "NVFP4":
      parts = gguf_packed.nvfp4_parts(stored, scale)
    else:
      parts = gguf_packed.mxfp4_parts(stored, scale)
    if parts is None:
      return None
    codes, group_scale, tensor_scale = parts
    return packed_weights.nvfp4(
      tensor.name,
      self._unpermuted(name, codes),
      self._unpermuted(name, group_scale),
      tensor_scale,
    )

  def _scale(self, name):
    if name not in self._scales:
      return 1.0
    return float(self._values(self._scales[name]).reshape(-1)[0])

  def _unpermuted(self, name, rows):
    """Rows in order: rope halves are interleaved in llama's files only."""
    if self._architecture != "llama":
      return rows
    if ".self_attn.q_proj." in name:
      return _unpermute(rows, self.config["num_attention_heads"])
    if ".self_attn.k_proj." in name:
      return _unpermute(rows, self.config["num_key_value_heads"])
    return rows

  def _mapped(self, tensor):
    """A tensor as it is stored.

    Mapped by itself: the pages of the reader's own map would stay in memory
    until the whole file does.
    """
    return np.memmap(
      self._path,
      dtype=tensor.data.dtype,
      mode="r",
      offset=int(tensor.data_offset),
      shape=tensor.data.shape,
    )

  def _values(self, tensor):
    """A tensor in float32."""
    mapped = self._mapped(tensor)
    try:
      values = self._gguf.quants.dequantize(mapped, tensor.tensor_type)
    except (NotImplementedError, ValueError, KeyError) as error:
      raise CheckpointError(
        f"{tensor.name} has GGUF type {tensor.tensor_type.name}, which the"
        f" gguf package cannot dequantize: {error}"
      ) from error
    return np.asarray(values, np.float32)

  def tokenizer_files(self) -> dict[str, bytes]:
    return gguf_tokenizer.tokenizer_files(self._metadata, self._path.name)


def _unpermute(w, heads):
  """Undoes the row order that GGUF uses for interleaved rope."""
  half = w.shape[0] // heads // 2
  split = w.reshape(heads, half, 2, *w.shape[1:])
  return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(w.shape)


def _import_gguf() -> Any:
  try:
    import gguf
    import gguf.quants
  except ImportError:
    raise CheckpointError(
      "reading GGUF needs the gguf package: pip install 'autoematic_jax[gguf]'"
    ) from None
  return gguf
