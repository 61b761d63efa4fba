"""JSON messages over a pair of pipes, a line each: a question goes out, its answer comes back in time or not at all."""

import json
import os
import select
import threading
import time
from typing import Any

from serve import typed_json

CHUNK = 1 << 16
LOOK_S = 0.2  # how soon a caller's change of mind is noticed


class Channel:
    """The asking side; it owns both pipes."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer = send, receive, b""
        os.set_blocking(send, False)

    def ask(self, message: dict[str, Any] | None, timeout_s: float, abandoned: threading.Event | None = None) -> dict[str, Any]:
        """The answer to a message (or what comes unasked); TimeoutError, also where it was abandoned, or BrokenPipeError."""
        deadline = time.monotonic() + timeout_s
        data = memoryview(b"" if message is None else typed_json.dumps(message).encode() + b"\n")
        while data or b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or (abandoned is not None and abandoned.is_set()):
                raise TimeoutError
            ready, writable, _ = select.select([self._receive], [self._send] if data else [], [], min(left, LOOK_S))
            if writable:
                data = data[os.write(self._send, data[:CHUNK]) :]
            if ready:
                chunk = os.read(self._receive, CHUNK)
                if not chunk:
                    raise BrokenPipeError
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Close both pipes."""
        os.close(self._send)
        os.close(self._receive)
