"""Errors that a person can act on; the CLI prints each as one line."""


class AutoematicError(Exception):
  """Base of every error that this project raises for its users."""


class UnsupportedModelError(AutoematicError):
  """A model, or an attribute of its config, that is not handled."""


class CheckpointError(AutoematicError):
  """A source or converted checkpoint that cannot be read as it is."""


class NonFiniteError(AutoematicError):
  """A weight holds NaN or Inf."""


class QTensorError(AutoematicError):
  """A quantized tensor that breaks its invariant."""


class PrecisionError(AutoematicError):
  """A precision that the checkpoint or the operation does not offer."""


class PromptError(AutoematicError):
  """A prompt or a sampling request that cannot be served."""
