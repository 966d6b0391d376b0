import dataclasses
from typing import Any
@dataclasses.dataclass(frozen=True)
class Operands:
  weight_codes: Any
  weight_scales: Any
  row_codes: Any
  row_scales: Any
  steps: Any
  counts: Any
  layer: Any
  weight_tensor_scale: Any
  row_tensor_scale: Any
import jax.numpy as jnp
@dataclasses.dataclass(frozen=True)
class Plan:
  depth:int
  rows:int
  row_tiles:int
  output_tiles:int
  base_tiles:int
  stored_tiles:int
  def weight_tile(self,tile):
    return jnp.where(tile>=self.base_tiles+self.stored_tiles,tile-self.base_tiles,tile)
  def row_scale_tile(self,tile):
    return jnp.where(tile>=self.base_tiles,tile-self.base_tiles,tile)
