"""The process: sockets, signals and the way out."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn

from autoematic_jax.serving.app import Api
from autoematic_jax.serving.engine import Engine

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
  """Uvicorn that drains: on SIGTERM new work is refused, what runs goes on.

  `announce` takes the address once it answers. After the config's
  `drain_seconds` the rest is aborted; a second signal aborts at once. The
  process then ends with code 0.
  """

  def __init__(
    self,
    api: Api,
    *,
    host: str,
    port: int,
    announce: Callable[[str], None] = print,
  ):
    config = uvicorn.Config(
      api.app(),
      host=host,
      port=port,
      log_level="warning",
      timeout_graceful_shutdown=5,
    )
    super().__init__(config)
    self._engine = api.engine
    self._announce = announce

  async def startup(self, sockets=None) -> None:
    """Binds the port and announces the address."""
    await super().startup(sockets)
    if self.started:
      host, port = self.servers[0].sockets[0].getsockname()[:2]
      self._announce(f"http://{host}:{port}")

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    """Replaces uvicorn's, which ends the process by the signal itself."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return
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
