"""The process: sockets, signals and the way out."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator

import uvicorn

from autoematic_jax.serving.app import Api
from autoematic_jax.serving.engine import Engine

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
  """Uvicorn that drains: on SIGTERM new work is refused, what runs goes on.

  After the config's `drain_seconds` the rest is aborted; a second signal
  aborts at once. The process then ends with code 0.
  """

  def __init__(self, api: Api, *, host: str, port: int):
    config = uvicorn.Config(
      api.app(),
      host=host,
      port=port,
      log_level="warning",
      timeout_graceful_shutdown=5,
    )
    super().__init__(config)
    self._engine = api.engine

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    """Replaces uvicorn's, which ends the process by the signal itself."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
      loop.add_signal_handler(number, self.drain)
    try:
      yield
    finally:
      for number in _SIGNALS:
        loop.remove_signal_handler(number)

  def drain(self) -> None:
    """Refuses new work and ends once the rest is done."""
    if self._engine.draining:
      self.should_exit = True
      return
    self._engine.draining = True
    self._draining = asyncio.ensure_future(self._drain())

  async def _drain(self):
    seconds = self._engine.config.drain_seconds
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(seconds):
        while self._engine.live:
          await asyncio.sleep(0.02)
    self.should_exit = True

  async def shutdown(self, sockets=None) -> None:
    """Ends what still runs, so that its clients hear of it."""
    await asyncio.to_thread(self._engine.stop)
    await super().shutdown(sockets)


def start(engine: Engine) -> None:
  """Compiles the engine's programs, showing the progress."""
  for done, count in engine.start():
    print(f"\rcompiling: {done} of {count} programs", end="", file=sys.stderr)
  print(file=sys.stderr)
