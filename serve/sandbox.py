"""A verifier in a process that can be killed: whatever it does, its caller waits no longer than the wall clock.

`signal.alarm` works in main threads only and cannot stop a loop in C; a subprocess can always be ended.
"""

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from serve.reward_function import RewardFunction, call

START_TIMEOUT_S = 60.0  # imports of a verifier's libraries, on a busy machine
GRACE_S = 0.5  # beyond the items' time, for an async function to say which of them took too long


class Sandbox:
    """One subprocess that scores batches one at a time; it starts with the first and again after each kill."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._loaded: set[str] = set()
        self._lock = threading.Lock()

    def score(self, scorer: str | RewardFunction, items: list[dict[str, Any]]) -> list[float | str]:
        """Rewards of items by a verifier (named by its data source) or a reward function, or the reason of each that has none."""
        with self._lock:
            try:
                name = self._load(scorer)
                reply = self._ask({"scorer": name, "items": items, "timeout_s": self.timeout_s}, self.timeout_s + GRACE_S)
            except TimeoutError:
                return [f"timeout: no score within {self.timeout_s:g} s"] * len(items)
            except BrokenPipeError:
                return ["error: the verifier's process died"] * len(items)
        if "error" in reply:
            return [f"error: {reply['error']}"] * len(items)
        return [score if isinstance(score, float) else f"error: {score}" for score in reply["scores"]]

    def close(self) -> None:
        """End the subprocess."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._buffer = None, b""
        self._loaded.clear()

    def _load(self, scorer: str | RewardFunction) -> str:
        """Import the scorer outside the items' own time; returns its name."""
        if self._process is None:
            path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serve.sandbox"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        name = scorer if isinstance(scorer, str) else f"{scorer.path}:{scorer.name}"
        if name not in self._loaded:
            function = None if isinstance(scorer, str) else dataclasses.asdict(scorer)
            self._ask({"load": name, "function": function}, START_TIMEOUT_S)  # an error is said with every item
            self._loaded.add(name)
        return name

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The reply to a message; TimeoutError or BrokenPipeError after which the process is gone."""
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
                    raise TimeoutError
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise BrokenPipeError
                self._buffer += chunk
        except (TimeoutError, BrokenPipeError):
            self.close()
            raise
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class _Scorers:
    """The subprocess's side: scorers by name, loaded once."""

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Any, str | None]] = {}  # the function, and its signature if it is a user's

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if "load" in message:
                self._load(message["load"], message["function"])
                return {}
            function, signature = self._functions.get(message["scorer"]) or self._load(message["scorer"], None)
            if signature is not None:
                return {"scores": call(function, signature, message["items"], message["timeout_s"])}
            return {"scores": [float(function(i["response"], i["ground_truth"], i["extra_info"])) for i in message["items"]]}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}

    def _load(self, name: str, function: dict[str, Any] | None) -> tuple[Any, str | None]:
        from serve.verifiers import find

        if function is None:
            self._functions[name] = (find(name).load(), None)
        else:
            own = RewardFunction(**function)
            self._functions[name] = (own.load(), own.signature)
        return self._functions[name]


def _serve_forever() -> None:
    """The subprocess: replies go to a private copy of stdout, so that nothing a verifier prints is taken for one."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    scorers = _Scorers()
    for line in sys.stdin.buffer:
        replies.write(json.dumps(scorers.answer(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve_forever()
