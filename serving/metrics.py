"""What the server did, in the names that others use."""

import threading
import time

import jax
import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client import Counter
from prometheus_client import Gauge
from prometheus_client import Histogram
from prometheus_client import generate_latest

_SECONDS = (
  *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
  *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0),
)

_compiled = 0
_listening = threading.Lock()
_registered = False


def _count(event, *_, **__):
  global _compiled
  if event == "/jax/core/compile/backend_compile_duration":
    _compiled += 1


def compilations() -> int:
  """Programs that this process compiled since it was first asked."""
  global _registered
  with _listening:
    if not _registered:
      jax.monitoring.register_event_duration_secs_listener(_count)
      _registered = True
  return _compiled


class Metrics:
  """Counters of one engine."""

  def __init__(self):
    self.registry = CollectorRegistry()
    self._compiled_before = compilations()
    self._preemptions = self._queries = self._hits = 0
    self._bits = self._layers = 0
    gauge, counter = self._gauge, self._counter
    self.running = gauge("num_requests_running", "Sequences with pages")
    self.waiting = gauge("num_requests_waiting", "Sequences in the queue")
    self.kv_usage = gauge("kv_cache_usage_perc", "Share of pages in use")
    self.queries = counter("prefix_cache_queries", "Prompt tokens looked up")
    self.hits = counter("prefix_cache_hits", "Prompt tokens found")
    self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
    self.generation_tokens = counter("generation_tokens", "Tokens generated")
    self.preemptions = counter("num_preemptions", "Sequences sent to the host")
    self.success = counter(
      "request_success", "Sequences that ended", ["finished_reason"]
    )
    self.executions = counter(
      "layer_executions", "Layers run", ["phase", "bits"]
    )
    self.execution_bits = gauge("execution_bits", "Mean bits of a layer run")
    self.compilations = gauge("compilations", "Programs compiled since start")
    seconds = self._seconds
    self.first_token = seconds("time_to_first_token_seconds")
    self.inter_token = seconds("inter_token_latency_seconds")
    self.whole = seconds("e2e_request_latency_seconds")
    self.queue = seconds("request_queue_time_seconds")
    self.prefill = seconds("request_prefill_time_seconds")
    self.decode = seconds("request_decode_time_seconds")

  def _gauge(self, name, text):
    return Gauge(f"autoematic:{name}", text, registry=self.registry)

  def _counter(self, name, text, labels=()):
    return Counter(f"autoematic:{name}", text, labels, registry=self.registry)

  def _seconds(self, name):
    text = name.removesuffix("_seconds").replace("_", " ")
    return Histogram(
      f"autoematic:{name}", text, buckets=_SECONDS, registry=self.registry
    )

  def count_compilations(self) -> None:
    """Counts programs from here on."""
    self._compiled_before = compilations()

  def render(self) -> bytes:
    """All of it in Prometheus' text format."""
    self.compilations.set(compilations() - self._compiled_before)
    return generate_latest(self.registry)

  def observe_state(self, scheduler) -> None:
    """Takes note of queues and pages after a tick."""
    self.running.set(len(scheduler.running))
    self.waiting.set(len(scheduler.waiting))
    self.kv_usage.set(scheduler.pool.usage)
    self.preemptions.inc(scheduler.preemptions - self._preemptions)
    self.queries.inc(scheduler.queries - self._queries)
    self.hits.inc(scheduler.hits - self._hits)
    self._preemptions = scheduler.preemptions
    self._queries, self._hits = scheduler.queries, scheduler.hits

  def observe_layers(self, phase: str, bits: np.ndarray) -> None:
    """Takes note of the bits `[L]` that the layers of a pass ran at."""
    for level, count in zip(*np.unique(bits, return_counts=True), strict=True):
      self.executions.labels(phase, str(level)).inc(int(count))
    self._bits += int(bits.sum())
    self._layers += len(bits)
    self.execution_bits.set(self._bits / self._layers)

  def observe_token(self, sequence, now: float) -> None:
    """Takes note of a token, before it is sent."""
    self.generation_tokens.inc()
    if sequence.first_token is None:
      sequence.first_token = now
      self.prompt_tokens.inc(len(sequence.prompt))
      self.first_token.observe(now - sequence.arrived)
      self.queue.observe(sequence.scheduled - sequence.arrived)
      self.prefill.observe(now - sequence.scheduled)
    else:
      self.inter_token.observe(now - sequence.last_token)
    sequence.last_token = now

  def observe_end(self, sequence, reason: str) -> None:
    """Takes note of how a sequence ended."""
    now = time.perf_counter()
    self.success.labels(reason).inc()
    self.whole.observe(now - sequence.arrived)
    if sequence.first_token is not None:
      self.decode.observe(now - sequence.first_token)
