"""Text of a sequence as it is made, up to a stop string."""

from collections.abc import Sequence

from autoematic_jax.tokenizer import StreamDecoder


class Detokenizer:
  """Whole characters as they become certain, and nothing of a stop string.

  Only text that may still become a stop string is held back.

  Attributes:
    stopped: Whether a stop string came.
  """

  def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = ()):
    self._decoder = decoder
    self._stop = tuple(stop)
    self._held = ""
    self.stopped = False

  def push(self, token: int) -> str:
    """Text that may be shown once this token came."""
    return self._take(self._decoder.push(token))

  def flush(self) -> str:
    """What is left at the end: it can become no stop string any more."""
    text = self._take(self._decoder.flush())
    if self.stopped:
      return text
    rest, self._held = self._held, ""
    return text + rest

  def _take(self, piece):
    if self.stopped or not piece:
      return ""
    text = self._held + piece
    found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
    if found:
      self.stopped, self._held = True, ""
      return text[: min(found)]
    kept = max((_overlap(text, stop) for stop in self._stop), default=0)
    certain = len(text) - kept
    self._held = text[certain:]
    return text[:certain]


def _overlap(text, stop):
  """Length of the longest end of `text` with which `stop` begins."""
  longest = min(len(text), len(stop) - 1)
  return next(n for n in range(longest, -1, -1) if text.endswith(stop[:n]))
