"""What is done to activations right before a product quantizes them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from autoematic_jax.arithmetic import ordered_sum
from autoematic_jax.pallas_kernels.extended_gemm.expanded import at_layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
  """Root-mean-square norm in float32.

  Attributes:
    scale: Of each layer.
    epsilon: Added to the mean square.
  """

  scale: Float[Array, "L K"]
  epsilon: float = dataclasses.field(metadata={"static": True})

  def __call__(
    self, x: Float[Array, "*B K"], layer: Int[Array, ""]
  ) -> Float[Array, "*B K"]:
    """Normed rows."""
    return rms_norm(x, at_layer(self.scale, layer), self.epsilon)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
  """`silu` of the first half of the columns, times the second."""

  def __call__(
    self, x: Float[Array, "*B F"], layer: Int[Array, ""]
  ) -> Float[Array, "*B K"]:
    """Gated rows."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


Before = Norm | Gate | None


def rms_norm(
  x: Float[Array, "*B K"], scale: Float[Array, "..."], epsilon: float
) -> Float[Array, "*B K"]:
  """`x` over the root of its mean square, times a scale that broadcasts."""
  mean_square = ordered_sum(jnp.square(x))[..., None] * (1 / x.shape[-1])
  return x * lax.rsqrt(mean_square + epsilon) * scale
