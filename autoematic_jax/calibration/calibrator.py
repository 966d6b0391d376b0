"""Quantizes a model layer by layer on a calibration text."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from absl import logging
from jaxtyping import Int

from autoematic_jax import formats
from autoematic_jax.calibration import activations
from autoematic_jax.calibration import budget
from autoematic_jax.calibration import gptq
from autoematic_jax.calibration import hessian
from autoematic_jax.calibration import prefix
from autoematic_jax.calibration import sensitivity
from autoematic_jax.calibration.groups import SCALE_TARGETS
from autoematic_jax.calibration.groups import GptqOptions
from autoematic_jax.calibration.hessian import Moments
from autoematic_jax.calibration.state import State
from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import NonFiniteError
from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models.builder import Tensors
from autoematic_jax.models.builder import build_layer
from autoematic_jax.models.config import ModelConfig

Weights = dict[str, np.ndarray]

# The text in the quantized model, and in full precision.
_OWN, _EXACT = "own", "exact"

# Projections whose outputs join the hidden states.
_LAST = (prefix.OUTPUT, prefix.DOWN)

_EMBEDDING, _NORM = "model.embed_tokens.weight", "model.norm.weight"
_HEAD = "lm_head.weight"

_SENSITIVITY_SAMPLES = 8
"""Samples on which sensitivity is measured; more spend the budget alike."""


@runtime_checkable
class Rounding(Protocol):
  """What a checkpoint's weights are rounded to."""

  @property
  def format(self) -> Any:
    """Format of the projections."""
    ...

  @property
  def rho(self) -> float:
    """Share of the subgroups that are refined."""
    ...

  @property
  def decoding(self) -> formats.Decoding:
    """Step of the offsets."""
    ...


@runtime_checkable
class ModelWeights(Protocol):
  """The full-precision model, read a piece at a time."""

  def tensor(self, name: str) -> np.ndarray:
    """A tensor by its full name, float32."""
    ...

  def layer(self, number: int) -> tuple[Weights, dict[str, list[str]]]:
    """Every tensor of a layer by name relative to it.

    And for each of `qkv`, `o`, `gate_up` and `down`, the names of the matrices
    that read that input.
    """
    ...


class Calibrator:
  """Turns one layer after the other into packed tensors.

  Each layer is calibrated on what the layers before it, already quantized,
  make of the text; weights are quantized, activations are not. Memory is one
  layer, the hidden states of the text, and what its widest projection reads.

  Args:
    tokens: `[samples, T]` token ids of the text.
    damping: Share of the Hessian's mean diagonal that is added to it.
    scale_targets: See `GptqOptions`.
    sweeps: See `GptqOptions`.
    spread: Whether the refined subgroups go where an error changes the next
      token most, over the whole model, instead of evenly to every input of
      every layer. Takes one more pass of a few samples, forward and back.
    corrected: Whether weights are first moved so that a projection's output on
      the quantized model's inputs is nearest to its output on full-precision
      inputs: layers then make good what those before them lost. The paper
      leaves this out.
    overlapping: Whether activations will be refined where weights are too (see
      `ActivationConfig`). If not, weights are refined where the activations
      lose least by it.
    state_folder: Keeps the layers that are done, so that the same calibration
      goes on where it was interrupted.
  """

  def __init__(
    self,
    tokens: Int[np.ndarray, "S T"],
    *,
    damping: float = 0.01,
    scale_targets: tuple[float, ...] = SCALE_TARGETS,
    sweeps: int = 2,
    spread: bool = True,
    corrected: bool = True,
    overlapping: bool = True,
    state_folder: Path | None = None,
  ):
    self._tokens = tokens
    self._damping = damping
    self._scale_targets = scale_targets
    self._sweeps = sweeps
    self._spread = spread
    self._corrected = corrected
    self._overlapping = overlapping
    self._state_folder = state_folder
    self._state: State | None = None

  @property
  def method(self) -> str:
    """What a checkpoint says about how it was made."""
    samples, length = self._tokens.shape
    return (
      f"GPTQ on {samples} x {length} tokens,"
      f" {len(self._scale_targets)} scale targets,"
      f" {self._sweeps} sweeps,"
      f" {'corrected' if self._corrected else 'original'} weights,"
      f" refinement {'by sensitivity' if self._spread else 'spread evenly'},"
      f" masks {'may overlap' if self._overlapping else 'apart'}"
    )

  def start(
    self, config: ModelConfig, weights: ModelWeights, options: Rounding
  ) -> None:
    """Embeds the text, or takes up an interrupted calibration.

    Args:
      config: The model's config.
      weights: Its tensors.
      options: Format, rho and decoding of the checkpoint.

    Raises:
      AutoematicError: The state folder belongs to another calibration, or what
        is kept of the text does not fit into memory.
      UnsupportedModelError: The model has experts.
    """
    if config.experts is not None:
      raise UnsupportedModelError(
        "experts cannot be calibrated: convert without --calibrate, which"
        " rounds their weights"
      )
    self._config, self._weights = config, weights
    self._check_memory()
    self._options = GptqOptions(
      format=options.format,
      rho=options.rho,
      decoding=options.decoding,
      damping=self._damping,
      scale_targets=self._scale_targets,
      sweeps=self._sweeps,
    )
    embedding = weights.tensor(_EMBEDDING)
    self._done, hidden, counts = 0, {}, None
    if self._state_folder is not None:
      self._state = State(self._state_folder, self._subject(embedding))
      self._done, hidden = self._state.progress()
      counts = self._state.counts()
    self._counts = self._spend(embedding) if counts is None else counts
    if self._state is not None:
      self._state.keep_counts(self._counts)
    if not hidden:
      embedded = embedding[self._tokens] * np.float32(config.embedding_scale)
      hidden = {name: embedded.copy() for name in self._stream_names()}
    if self._done:
      logging.info("going on after %d calibrated layers", self._done)
    self._streams = {
      name: prefix.Prefix(config, array) for name, array in hidden.items()
    }

  def layer(self, number: int) -> dict[str, formats.QTensor]:
    """Quantizes the next layer's projections and runs the text through it.

    Args:
      number: The layer; each follows the one before it.

    Returns:
      The packed projections, by name relative to the layer.

    Raises:
      NonFiniteError: What a projection reads holds NaN or Inf.
    """
    if number < self._done and self._state is not None:
      return self._state.layer(number)
    weights, groups = self._weights.layer(number)
    current: Tensors = dict(weights)
    packed: dict[str, formats.QTensor] = {}
    exact = (
      build_layer(self._config, dict(weights), number)
      if self._corrected
      else None
    )
    own = build_layer(self._config, current, number)
    for reader in (prefix.QKV, prefix.OUTPUT, prefix.GATE_UP, prefix.DOWN):
      names = groups[reader]
      moments, activation_gain, inputs = self._read(own, exact, reader)
      if not moments.finite:
        raise NonFiniteError(
          f"calibration: what {names[0]} of layer {number} reads holds NaN or"
          " Inf; the model overflows on this text, or is damaged"
        )
      tensors = self._quantize(
        [weights[n] for n in names],
        moments,
        names,
        refined=self._counts.get(_key(number, reader)),
        activation_gain=activation_gain,
      )
      for name, tensor in zip(names, tensors, strict=True):
        packed[name] = tensor
        current[name] = np.asarray(formats.dequantize(tensor))
      own = build_layer(self._config, current, number)
      if reader in _LAST:
        self._streams[_OWN].add_output(own, reader, inputs)
    if self._state is not None:
      hidden = {name: s.hidden for name, s in self._streams.items()}
      self._state.add(number, packed, hidden)
    return packed

  def finish(self) -> None:
    """Removes what was kept for an interruption."""
    if self._state is not None:
      self._state.discard()

  def _check_memory(self):
    """Refuses what would be killed half-way."""
    config, free = self._config, _available_bytes()
    widest = max(config.intermediate_size, config.num_heads * config.head_dim)
    held = len(self._stream_names()) * config.hidden_size + widest
    needed = self._tokens.size * held * np.dtype(np.float32).itemsize
    if free is not None and needed > free:
      samples, length = self._tokens.shape
      raise AutoematicError(
        f"calibration on {samples} x {length} tokens keeps"
        f" {needed / 1e9:.3g} GB of hidden states, and {free / 1e9:.3g} GB of"
        " memory are free; use fewer --calibration-samples"
      )

  def _spend(self, embedding) -> dict[str, int]:
    """Refined subgroups of each input; none named where all get the same."""
    if not self._spread or not self._options.refined:
      return {}
    config = self._config
    tied = config.tie_word_embeddings
    groups: dict[int, dict[str, list[str]]] = {}

    def read_layer(number):
      weights, groups[number] = self._weights.layer(number)
      return weights

    measured = sensitivity.measure(
      config,
      self._tokens[:: -(-len(self._tokens) // _SENSITIVITY_SAMPLES)],
      embedding=embedding,
      norm=self._weights.tensor(_NORM),
      head=embedding if tied else self._weights.tensor(_HEAD),
      read_layer=read_layer,
      decoding=None if self._overlapping else self._options.decoding,
    )
    candidates = {
      _key(number, reader): budget.candidates(
        [weights[name] for name in names],
        gradients=layer.gradients[reader],
        inputs=layer.inputs[reader],
        activation_gain=layer.activation_gains.get(reader),
        format=self._options.format,
        decoding=self._options.decoding,
      )
      for number, weights, layer in measured
      for reader, names in groups[number].items()
    }
    return budget.spend(candidates, self._options.rho)

  def _stream_names(self):
    return (_OWN, _EXACT) if self._corrected else (_OWN,)

  def _subject(self, embedding):
    """What tells this calibration from another."""
    digest = hashlib.sha256(self._tokens.tobytes())
    digest.update(embedding.tobytes())
    return {
      "method": self.method,
      "options": dataclasses.asdict(self._options),
      "config": self._config.to_dict(),
      "text_and_embedding": digest.hexdigest(),
    }

  def _read(self, own, exact, reader):
    """Moments of a projection's inputs, gain of refining these, and they.

    The gain is None where it does not matter, and the inputs are left out
    where they do not go on.
    """
    last = reader in _LAST
    streams = [self._streams[_OWN].inputs(own, reader)]
    if exact is not None:
      streams.append(self._streams[_EXACT].inputs(exact, reader, pass_on=last))
    moments, inputs = None, []
    gain = None
    for several in zip(*streams, strict=True):
      rows = [x.reshape(-1, x.shape[-1]) for x in several]
      moments = moments or Moments(rows[0].shape[1])
      moments.add(*rows)
      if self._options.refined and not self._overlapping:
        more = activations.refinement_gain(rows[0], self._options.decoding)
        gain = more if gain is None else gain + more
      if last:
        inputs.append(np.asarray(several[0]))
    assert moments is not None
    if gain is not None:
      gain = np.asarray(gain, np.float64) / self._tokens.size
    return moments, gain, inputs

  def _quantize(self, weights, moments, names, *, refined, activation_gain):
    second = moments.hessian
    factor = hessian.factor(second, self._options.damping)
    if factor is not None:
      if factor.damping > self._options.damping:
        logging.warning(
          "%s: damping raised to %g of the mean diagonal",
          ", ".join(names),
          factor.damping,
        )
      if self._corrected:
        weights = hessian.corrected(
          weights, second, moments.cross, factor.damping
        )
      loss = None
      if activation_gain is not None:
        loss = budget.activation_loss(np.concatenate(weights), activation_gain)
      return gptq.quantize_jointly(
        weights, factor, self._options, refined=refined, loss=loss
      )
    logging.warning(
      "%s: the inputs' Hessian has no Cholesky factor even with damping;"
      " rounded to nearest",
      ", ".join(names),
    )
    return formats.quantize_weights(
      weights,
      format=self._options.format,
      rho=self._options.rho,
      decoding=self._options.decoding,
    )


def _key(number: int, reader: str) -> str:
  """Names an input of a layer."""
  return f"{number}.{reader}"


def _available_bytes() -> int | None:
  """Memory that can still be taken, where Linux tells."""
  try:
    lines = Path("/proc/meminfo").read_text().splitlines()
  except OSError:
    return None
  found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
  return 1024 * int(found[0]) if found else None
