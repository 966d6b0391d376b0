"""Times of the GEMM's forms against bf16 and the hardware's limits.

Activations are quantized before a product is timed. Times are means over
several layers, whose weights together exceed the L2 cache of a GPU.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from autoematic_jax.errors import AutoematicError
from autoematic_jax.evaluation.kernel_forms import FORMS
from autoematic_jax.evaluation.kernel_forms import Forms
from autoematic_jax.evaluation.synthetic import implementation

SHAPES = {
  "qwen3-8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
  "llama-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
  "measured": ((28672, 8192), (12288, 4096), (4096, 12288)),
  "small": ((512, 512), (256, 1024)),
}
"""Outputs and inputs of a layer's GEMMs: q, k and v joined, gate and up too."""

_L2_BYTES = 120e6

# Kernels inside a condition on the device are not all counted, and a product
# then looks faster than the device can be. The limits are measured as well.
_CREDIBLE_SHARE = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
  """What to time.

  Attributes:
    shapes: Names in `SHAPES`.
    rows: Rows of x.
    forms: Of `FORMS`.
    repeats: Times of which the median is taken.
  """

  shapes: tuple[str, ...]
  rows: tuple[int, ...]
  forms: tuple[str, ...] = FORMS
  repeats: int = 15


def limits() -> dict[str, float]:
  """What this device reaches: reading and writing memory, bf16 products."""
  on_cpu = jax.default_backend() == "cpu"
  size = 2**24 if on_cpu else 2**29
  n = 1024 if on_cpu else 8192
  x = jnp.ones((size,), jnp.float32)
  seconds = _seconds(jax.jit(lambda x: x + 1), 5, x)
  a = jnp.ones((n, n), jnp.bfloat16)
  product = _seconds(jax.jit(lambda a: a @ a), 5, a)
  return {
    "tb_per_s": 8 * size / seconds / 1e12,
    "bf16_tflops": 2 * n**3 / product / 1e12,
  }


def measure_all(
  options: KernelOptions, found: dict[str, float]
) -> Iterator[dict[str, Any]]:
  """Checks each form against float32 and times it.

  Args:
    options: What to time.
    found: `limits()`, of which each row gives its share: the memory's where
      reading the weights takes longest, else the arithmetic's.

  Yields:
    A row for each form, shape and number of rows, once it is measured.

  Raises:
    AutoematicError: A product is wrong.
  """
  shapes = [shape for name in options.shapes for shape in SHAPES[name]]
  total = len(shapes) * len(options.rows) * len(options.forms)
  with tqdm(total=total, unit="form") as progress:
    for n, k in dict.fromkeys(shapes):
      made = Forms(n, k, _layer_count(n, k))
      for m in options.rows:
        base = None
        for form in options.forms:
          progress.set_postfix_str(f"{form} {m} x {n} x {k}")
          row = _measure(form, m, made, options.repeats, found)
          base = row["us"] if form == "bf16" else base
          row["ratio_to_bf16"] = base / row["us"] if base else None
          progress.update()
          yield row


def _layer_count(n, k):
  """Layers that together are more than the L2 cache holds."""
  if jax.default_backend() == "cpu":
    return 1
  return min(12, max(2, round(2 * _L2_BYTES / (n * k * 9 / 16))))


def _measure(form, m, forms, repeats, found):
  n, k, layers = forms.n, forms.k, len(forms.layers)
  case = forms.case(form, m)
  last = jax.jit(partial(case.run, layer=layers - 1))
  _check(form, last(case.operand, case.weight), case.wanted, (m, n, k))

  @jax.jit
  def every_layer(operand, weight):
    return [case.run(operand, weight, layer) for layer in range(layers)]

  def rates(seconds):
    us = seconds(every_layer, repeats, case.operand, case.weight) / layers * 1e6
    tb_per_s, tflops = case.nbytes / us / 1e6, 2 * m * n * k / us / 1e6
    share = max(tb_per_s / found["tb_per_s"], tflops / found["bf16_tflops"])
    return {
      "us": us,
      "tb_per_s": tb_per_s,
      "tflops": tflops,
      "share_of_limit": share,
    }

  row, timed_by = rates(_seconds), "kernels" if _counts_kernels() else "clock"
  if timed_by == "kernels" and row["share_of_limit"] > _CREDIBLE_SHARE:
    row, timed_by = rates(_clock), "clock"
  return {
    "form": form,
    "implementation": "xla" if form == "bf16" else implementation(),
    "timed_by": timed_by,
    "m": m,
    "n": n,
    "k": k,
    **row,
  }


def _check(form, actual, wanted, shape):
  error = float(jnp.max(jnp.abs(actual - wanted)) / jnp.max(jnp.abs(wanted)))
  allowed = 2e-2 if form == "bf16" else 3e-5
  if not error <= allowed:
    m, n, k = shape
    raise AutoematicError(
      f"{form} of {m} x {n} x {k} is off by {error:.1e} of the largest result;"
      f" {allowed:.0e} is allowed. It was not timed"
    )


def _counts_kernels():
  return jax.default_backend() == "gpu"


def _seconds(run, repeats, *args) -> float:
  """Median time of a call: of its kernels on a GPU, else by the clock."""
  if not _counts_kernels():
    return _clock(run, repeats, *args)
  # Imports Mosaic, which a CPU does without.
  from jax.experimental.mosaic.gpu import profiler

  # One by one: several iterations must run the same kernels, and which of
  # them a condition on the device starts is seen too late for that.
  measure = profiler.measure(run, aggregate=True)
  return statistics.median(measure(*args)[1] for _ in range(repeats)) / 1e3


def _clock(run, repeats, *args) -> float:
  """Median time of a call, its start included."""
  jax.block_until_ready(run(*args))
  times = []
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(run(*args))
    times.append(time.perf_counter() - begin)
  return statistics.median(times)


HEADER = (
  f"{'form':>11} {'m':>5} {'n':>6} {'k':>6} {'us':>10} {'x bf16':>7}"
  f" {'TB/s':>6} {'TFLOP/s':>8} {'of limit':>8}  run by, timed by"
)
"""Names of the columns of `line`."""


def line(row: dict[str, Any]) -> str:
  """A row as text."""
  ratio = row["ratio_to_bf16"]
  return (
    f"{row['form']:>11} {row['m']:>5} {row['n']:>6} {row['k']:>6}"
    f" {row['us']:>10.1f} {'' if ratio is None else f'{ratio:.2f}':>7}"
    f" {row['tb_per_s']:>6.2f} {row['tflops']:>8.2f}"
    f" {row['share_of_limit']:>8.0%}  {row['implementation']},"
    f" {row['timed_by']}"
  )
