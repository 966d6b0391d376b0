"""The policy that a checkpoint holds, written anew."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints.loader import load_checkpoint
from autoematic_jax.errors import CheckpointError
from autoematic_jax.files import replacing


def store_policy(
  path: str | os.PathLike[str],
  policy: Mapping[str, Any],
  sensitivity: Mapping[str, Any],
) -> None:
  """Replaces the policy of a checkpoint, whose weights stay as they are.

  Args:
    path: The checkpoint's directory.
    policy: Every field of the policy.
    sensitivity: What its floors follow from, kept beside it for people.

  Raises:
    CheckpointError: It is no checkpoint, or cannot be written.
  """
  metadata = load_checkpoint(path).metadata
  metadata = {
    **metadata,
    "policy": dict(policy),
    "sensitivity": dict(sensitivity),
  }
  file = Path(path) / layout.METADATA
  try:
    with replacing(file) as partial:
      partial.write_text(json.dumps(metadata, indent=2))
  except OSError as error:
    raise CheckpointError(f"cannot write {file}: {error}") from error
