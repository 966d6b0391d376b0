"""Which experts a token runs through, and with what share."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax import bfloat16
from autoematic_jax.arithmetic import exact_divide
from autoematic_jax.arithmetic import ordered_sum
from autoematic_jax.arithmetic import softmax
from autoematic_jax.models.config import ExpertsConfig
from autoematic_jax.models.layers import dense_rows
from autoematic_jax.pallas_kernels.extended_gemm import at_layer


class Router(nnx.Module):
  """Probabilities of the experts in full precision, of stacked kernels.

  Args:
    kernel: `[L, E, D]`, or of one layer `[E, D]`.
    config: How experts are chosen.
  """

  def __init__(self, kernel: bfloat16.Stored, config: ExpertsConfig):
    self.kernel = nnx.Param(kernel)
    self.config = config

  def __call__(
    self, x: Float[Array, "B T D"], layer: Int[Array, ""]
  ) -> Float[Array, "B T E"]:
    """Share of each expert in a token's output; 0 where it is not chosen."""
    rows = x.reshape(-1, x.shape[-1])
    kernel = at_layer(self.kernel.get_value(), layer)
    # Row by row, as a last bit may decide which expert runs.
    scores = softmax(dense_rows(rows, kernel, one_by_one=True))
    chosen, experts = lax.top_k(scores, self.config.per_token)
    if self.config.renormalize:
      chosen = exact_divide(chosen, ordered_sum(chosen)[..., None])
    places = jax.nn.one_hot(experts, self.config.count, dtype=jnp.float32)
    shares = jnp.sum(places * chosen[..., None], axis=-2)
    return shares.reshape(*x.shape[:2], -1)
