"""Starts a kernel whose body is written in the operations of `mlir.py`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

Body = Callable[..., None]
"""Emits a kernel, given the operands' names and then their references: those of
what is updated, of the results, and of shared memory where there is any, come
last."""


def launch(
  emit: Body,
  operands: Mapping[str, jax.Array],
  results: Mapping[str, jax.ShapeDtypeStruct],
  *,
  name: str,
  blocks: int,
  threads: int,
  shared_words: int = 0,
  cluster: int = 1,
  updates: Mapping[str, jax.Array] | None = None,
) -> Any:
  """Runs a kernel.

  Args:
    emit: Its body.
    operands: In device memory.
    results: What it writes, by name.
    name: Under which profilers show it.
    blocks: Of the grid, those of a cluster counted apart.
    threads: Of a block, whole warpgroups of 128.
    shared_words: 32-bit words of shared memory of a block.
    cluster: Blocks that share their memory.
    updates: What it writes in place: other elements keep their values.

  Returns:
    The result, or a tuple of several, updated arrays last.
  """
  updated = {name: jax.new_ref(x) for name, x in (updates or {}).items()}
  names = (*operands, *updated, *results)

  def kernel(*refs):
    emit_refs = plgpu.inline_mgpu(
      arg_types=tuple(plgpu.RefType() for _ in refs)
    )
    emit_refs(lambda _, *inner: emit(names, *inner))(*refs)
    # Pallas does not see what `emit` writes; this it sees, and it never runs.
    for ref in refs[len(operands) : len(operands) + len(updated)]:
      pl.when(lax.axis_index("n") < 0)(partial(_rewrite, ref))

  kernel.__name__ = name
  options: dict[str, Any] = {}
  out_types = list(results.values())
  if shared_words:
    options["scratch_types"] = (plgpu.SMEM((shared_words,), jnp.uint32),)
  if cluster > 1:
    options |= {"cluster": (cluster,), "cluster_names": ("k",)}
  out = plgpu.kernel(
    kernel,
    out_type=out_types if len(results) > 1 else out_types[0],
    grid=(blocks // cluster,),
    grid_names=("n",),
    num_threads=threads // 128,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
    **options,
  )(*operands.values(), *updated.values())
  written = list(out) if len(results) > 1 else [out]
  written += [jax.freeze(ref) for ref in updated.values()]
  return tuple(written) if len(written) > 1 else written[0]


def _rewrite(ref):
  first = (0,) * len(ref.shape)
  ref[first] = ref[first]
