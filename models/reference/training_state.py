"""What training keeps between runs, in one file."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from autoematic_jax.files import replacing
from autoematic_jax.models.reference import network
from autoematic_jax.models.reference.network import NetworkConfig
from autoematic_jax.models.reference.network import Params


class State(NamedTuple):
  """Weights and what the optimizer knows; it counts the steps too."""

  params: Params
  optimizer: PyTree


def initial(
  config: NetworkConfig, optimizer: optax.GradientTransformation, seed: int
) -> State:
  """The state before the first step."""
  params = network.init(jax.random.key(seed), config)
  return State(params, optimizer.init(params))


def save(path: Path, state: State, chunks: int) -> None:
  """Replaces the file at once: a run that is killed leaves the old one.

  Args:
    path: Ends in `.npz`.
    state: What to keep.
    chunks: Chunks that it was trained on.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as partial:
    np.savez(partial, chunks=chunks, **_by_name(jax.device_get(state)))


def load(path: Path, like: State) -> tuple[State, int]:
  """The state of a file, and the chunks that it was trained on.

  Args:
    path: What `save` wrote.
    like: A state of the same structure and shapes.

  Raises:
    ValueError: The file holds another network or optimizer.
  """
  with np.load(path) as file:
    named = {name: file[name] for name in file.files}
  chunks = int(named.pop("chunks"))
  shapes = {name: np.shape(x) for name, x in _by_name(like).items()}
  if {name: x.shape for name, x in named.items()} != shapes:
    raise ValueError(f"{path} holds another network; remove it to start anew")
  arrays = [jnp.asarray(named[name]) for name in shapes]
  return jax.tree.unflatten(jax.tree.structure(like), arrays), chunks


def load_params(path: Path, config: NetworkConfig) -> Params:
  """The weights alone, without knowing the optimizer.

  Raises:
    ValueError: The file holds a network of other sizes.
  """
  shapes = jax.eval_shape(lambda: network.init(jax.random.key(0), config))
  named = _by_name(State(shapes, ()))
  with np.load(path) as file:
    arrays = [file[name] for name in named]
  if [x.shape for x in arrays] != [x.shape for x in named.values()]:
    raise ValueError(f"{path} holds a network of other sizes")
  return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def _by_name(state: State) -> dict[str, Any]:
  paths, _ = jax.tree_util.tree_flatten_with_path(state)
  return {jax.tree_util.keystr(path): leaf for path, leaf in paths}
