"""Reading model files and writing converted checkpoints."""

from autoematic_jax.checkpoints.convert import convert
from autoematic_jax.checkpoints.layout import Sizes
from autoematic_jax.checkpoints.loader import Checkpoint
from autoematic_jax.checkpoints.loader import load_checkpoint
from autoematic_jax.checkpoints.policy_metadata import store_policy
from autoematic_jax.checkpoints.source import Source
from autoematic_jax.checkpoints.source import open_source

__all__ = [
  "Checkpoint",
  "Sizes",
  "Source",
  "convert",
  "load_checkpoint",
  "open_source",
  "store_policy",
]
