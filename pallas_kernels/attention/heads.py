"""Norms of single heads."""

import dataclasses

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadNorms:
  """Root-mean-square norms of queries and keys, head by head.

  Attributes:
    query: Scales of each layer.
    key: The same for keys.
    epsilon: Added to the mean square.
  """

  query: Float[Array, "L D"]
  key: Float[Array, "L D"]
  epsilon: float = dataclasses.field(metadata={"static": True})
