"""A verifier in a process that can be killed: whatever it does, its caller waits no longer than the wall clock.

`signal.alarm` works in main threads only and cannot stop a loop in C; a subprocess can always be ended.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0  # imports of a verifier's libraries, on a busy machine


class SandboxTimeout(Exception):
    """The verifier was still running when its time was up, and has been killed."""


class SandboxError(Exception):
    """The verifier raised, or its process died."""


class Sandbox:
    """One subprocess that scores items one at a time; it starts with the first item and again after each kill."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._loaded: set[str] = set()
        self._lock = threading.Lock()

    def score(self, data_source: str, response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        """Score one item; raises SandboxTimeout or SandboxError."""
        with self._lock:
            self._load(data_source)
            reply = self._ask([data_source, response, ground_truth, extra_info], self.timeout_s)
        if "error" in reply:
            raise SandboxError(reply["error"])
        return float(reply["score"])

    def close(self) -> None:
        """End the subprocess."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._buffer = None, b""
        self._loaded.clear()

    def _load(self, data_source: str) -> None:
        """Import the verifier outside the item's own time."""
        if self._process is None:
            path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serve.sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        if data_source not in self._loaded:
            reply = self._ask([data_source], START_TIMEOUT_S)
            if "error" in reply:
                raise SandboxError(reply["error"])
            self._loaded.add(data_source)

    def _ask(self, message: list[Any], timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            deadline = time.monotonic() + timeout_s
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                    self.close()
                    raise SandboxTimeout(f"no score within {timeout_s:g} s")
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise BrokenPipeError
                self._buffer += chunk
        except BrokenPipeError:
            self.close()
            raise SandboxError("the verifier's process died") from None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def _serve_forever() -> None:
    """The subprocess: replies go to a private copy of stdout, so that nothing a verifier prints is taken for one."""
    from serve.verifiers import find

    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        data_source, *item = json.loads(line)
        try:
            score = find(data_source).load()
            reply: dict[str, Any] = {"score": float(score(*item))} if item else {}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        replies.write(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve_forever()
