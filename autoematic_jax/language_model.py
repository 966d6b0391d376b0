"""A loaded checkpoint: decoder, tokenizer and what it can run at."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from autoematic_jax import formats
from autoematic_jax import kv_cache
from autoematic_jax import kv_codecs
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.errors import PrecisionError
from autoematic_jax.models.builder import Implementation
from autoematic_jax.models.builder import Tensors
from autoematic_jax.models.builder import build_decoder
from autoematic_jax.models.config import ModelConfig
from autoematic_jax.models.transformer import Decoder
from autoematic_jax.pallas_kernels.activation_quantization import (
  ActivationConfig,
)
from autoematic_jax.pallas_kernels.extended_gemm import KERNEL_FORMATS
from autoematic_jax.pallas_kernels.extended_gemm import mosaic_sm90
from autoematic_jax.policy import PolicyConfig
from autoematic_jax.programs import Programs
from autoematic_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
  """Everything that `generate` needs.

  Attributes:
    decoder: The model with its weights.
    tokenizer: The checkpoint's tokenizer and chat template.
    config: Shape of the model.
    format: Format of the projections: `autofp6`, `nvfp4`, ..., `fp32`.
    levels: Bits that layers can run at, ascending; empty when unquantized.
    decoding: Step of the offsets.
    policy: Constants of the run-time policy.
    dtype: Floating dtype of an unquantized model's projections.
    activation: How activations, and keys and values, are refined.
    implementation: What multiplies by its quantized weights.
    stored_bits: Bits on disk for each quantized weight, or for each weight
      of an unquantized checkpoint.
    programs: Compiled programs of this model.
  """

  decoder: Decoder
  tokenizer: Tokenizer
  config: ModelConfig
  format: str
  levels: tuple[int, ...]
  decoding: formats.Decoding
  policy: PolicyConfig
  dtype: jnp.dtype
  activation: ActivationConfig
  implementation: Implementation
  stored_bits: float
  programs: Programs = dataclasses.field(default_factory=Programs)

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Tokens with which the model ends an answer."""
    return self.tokenizer.eos_ids

  @property
  def precisions(self) -> tuple[str | int, ...]:
    """What `generate(precision=...)` accepts by name, the default first."""
    if not self.levels:
      return ("bf16",) if self.dtype == jnp.bfloat16 else ("fp32",)
    if len(self.levels) == 1:
      return self.levels
    return ("adaptive", *self.levels)

  def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
    """An empty cache in the format that these weights run with."""
    if self.format == "fp6g" and self.levels:
      codec = kv_codecs.FP6gCodec()
    elif self.levels:
      codec = kv_codecs.AutoFPCodec(self.decoding, self.activation.nearest_base)
    else:
      codec = kv_codecs.DenseCodec(str(self.dtype))
    return kv_cache.init_cache(
      num_layers=self.config.num_layers,
      batch=batch,
      num_kv_heads=self.config.num_kv_heads,
      head_dim=self.config.head_dim,
      capacity=capacity,
      codec=codec,
    )

  def with_policy(self, policy: PolicyConfig) -> "LanguageModel":
    """The same model under another policy.

    Raises:
      PrecisionError: The policy asks for levels that are not stored, or has
        floors for another number of layers.
    """
    _check_policy(policy, self.levels, self.format, self.config)
    return dataclasses.replace(self, policy=policy)


def load(
  path: str | os.PathLike[str],
  *,
  policy: PolicyConfig | None = None,
  compute_dtype: str | None = None,
  dense: bool = False,
  activation: ActivationConfig | None = None,
  implementation: Implementation | None = None,
  decode_rows: int = 16,
) -> LanguageModel:
  """Loads a checkpoint that `autoematic convert` wrote.

  Args:
    path: The checkpoint's directory.
    policy: Overrides the policy stored with the checkpoint.
    compute_dtype: `float32` or `bfloat16` projections of an unquantized
      checkpoint; None takes the stored dtype.
    dense: Dequantizes the weights at their highest level and runs them, and
      everything else, in floating point.
    activation: How activations are refined at 6 and 8 bits; None is what
      measures best (the paper's way is `activation_quantization.PAPER`).
    implementation: What multiplies by quantized weights: `xla` anywhere,
      `mosaic_sm90` on a Hopper GPU, at 4 and 6 bits. None takes the latter
      where it runs; the model says which it has.
    decode_rows: Requests in the largest decode batch, for `mosaic_sm90`, at
      most 64; up to 16 run a few percent faster where it is 16.

  Returns:
    The model, ready for `generate`.

  Raises:
    CheckpointError: The directory is not a whole, unaltered checkpoint.
    PrecisionError: The policy asks for levels that are not stored, or has
      floors for another number of layers, or the implementation does not run
      this format or on this device.
  """
  checkpoint = load_checkpoint(Path(path))
  levels = () if dense else tuple(checkpoint.levels)
  policy = policy or _stored_policy(checkpoint, levels)
  implementation = implementation or _implementation(checkpoint, levels, policy)
  if implementation == "mosaic_sm90":
    mosaic_sm90.check_device()
    levels = _levels_on_hopper(levels, policy)
  _check_policy(policy, levels, checkpoint.format, checkpoint.config)
  dtype = _dense_dtype(checkpoint, compute_dtype)
  activation = activation or ActivationConfig()
  decoder = build_decoder(
    checkpoint.config,
    layers=_layers(checkpoint, dense),
    rest=checkpoint.rest(),
    dtype=dtype,
    activation=activation,
    implementation=implementation,
    decode_rows=decode_rows,
  )
  return LanguageModel(
    decoder=decoder,
    tokenizer=Tokenizer.from_dir(checkpoint.tokenizer_dir),
    config=checkpoint.config,
    format=checkpoint.format,
    levels=levels,
    decoding=checkpoint.decoding,
    policy=policy,
    dtype=dtype,
    activation=activation,
    implementation=implementation,
    stored_bits=checkpoint.stored_bits,
  )


def _implementation(checkpoint, levels, policy) -> Implementation:
  """The fastest that runs this checkpoint here."""
  known = set(mosaic_sm90.LEVELS)
  serves = checkpoint.format in KERNEL_FORMATS and known & set(levels)
  serves = serves and checkpoint.config.experts is None
  if len(levels) > 1:
    serves = serves and set(policy.levels) <= known
  return "mosaic_sm90" if serves and mosaic_sm90.runs() else "xla"


def _levels_on_hopper(levels, policy):
  known = mosaic_sm90.LEVELS
  if len(levels) > 1 and not set(policy.levels) <= set(known):
    raise PrecisionError(
      f"the policy chooses from {policy.levels}; 'mosaic_sm90' runs at"
      f" {known}. Give a policy with levels={known}, or use 'xla'"
    )
  return tuple(level for level in levels if level in known)


def _layers(checkpoint, dense) -> Iterator[Tensors]:
  """Tensors of each layer in order, read when asked for."""
  for layer in range(checkpoint.config.num_layers):
    tensors = checkpoint.layer(layer)
    if dense:
      tensors = {
        name: formats.dequantize(tensor)
        if isinstance(tensor, formats.QTensor)
        else tensor
        for name, tensor in tensors.items()
      }
    yield tensors


def _check_policy(policy, levels, name, config):
  if levels and not set(policy.levels) <= set(levels):
    raise PrecisionError(
      f"the policy's levels {policy.levels} are not all held by this"
      f" {name} checkpoint, which offers {levels}"
    )
  floors = len(policy.layer_floors)
  if floors not in (0, config.num_layers):
    raise PrecisionError(
      f"the policy's layer_floors are for {floors} layers; this model has"
      f" {config.num_layers}"
    )


def _stored_policy(checkpoint, levels):
  if checkpoint.policy is not None:
    return PolicyConfig.from_dict(checkpoint.policy)
  return PolicyConfig(levels=levels) if levels else PolicyConfig()


def _dense_dtype(checkpoint, compute_dtype):
  if compute_dtype is None:
    compute_dtype = "bfloat16" if checkpoint.format == "bf16" else "float32"
  if compute_dtype not in ("float32", "bfloat16"):
    raise PrecisionError(f"{compute_dtype=} must be 'float32' or 'bfloat16'")
  return jnp.dtype(compute_dtype)
