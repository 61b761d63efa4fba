"""A scorer in processes that can be killed and reach nothing: whatever it does, its caller waits no longer than the wall clock.

`Sandbox` is the caller's side; `keeper.py` is what runs on the other, and `isolation.py` says how it is confined.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from serve.reward_function import RewardFunction, Scored
from serve.sandbox import isolation
from serve.sandbox.channel import Channel

START_TIMEOUT_S = 60.0  # imports of a verifier's libraries, on a busy machine
BACKSTOP_S = 5.0  # a keeper that has not answered this long after its own clock is killed whole


class Sandbox:
    """Scores batches one at a time; its processes start with the first and again after each kill.

    `isolated` keeps network, files, environment and other processes from the scorer, and bounds its memory.
    """

    def __init__(self, timeout_s: float, memory_gib: float = 4.0, isolated: bool = True) -> None:
        self.timeout_s, self.memory_gib, self.isolated = timeout_s, memory_gib, isolated
        self.missing: list[str] = []  # what the machine could not keep from the scorer, once it has started
        self._process: subprocess.Popen[bytes] | None = None
        self._readable: list[str] = []
        self._scratch = ""
        self._channel: Channel | None = None
        self._loaded: set[str] = set()
        self._failures: dict[str, str] = {}
        self._lock = threading.Lock()
        self._abandoned = threading.Event()

    def score(
        self,
        scorer: str | RewardFunction,
        items: list[dict[str, Any]],
        timeout_s: float | None = None,
        abandoned: threading.Event | None = None,
    ) -> list[Scored]:
        """Rewards of items by a verifier (named by its data source) or a reward function, or the reason of each that has none.

        Once `abandoned` is set the work is killed.
        """
        clock = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            self._abandoned = abandoned or threading.Event()
            try:
                name, function = self._load(scorer)
                message = {"scorer": name, "function": function, "items": items, "timeout_s": clock}
                reply = self._ask(message, clock + BACKSTOP_S)
            except TimeoutError:
                reply = {"timeout": True}
            except BrokenPipeError:
                reply = {"died": True}
        if "timeout" in reply:
            return [f"timeout: no score within {clock:g} s"] * len(items)
        if "died" in reply:
            return ["error: the verifier's process died"] * len(items)
        if "error" in reply:
            return [f"error: {reply['error']}"] * len(items)
        return [_read(score) for score in reply["scores"]]

    def failure_of(self, scorer: str | RewardFunction) -> str | None:
        """Why a scorer cannot be loaded; None if it can."""
        with self._lock:
            try:
                name, _ = self._load(scorer)
            except (TimeoutError, BrokenPipeError) as error:
                return "it took too long" if isinstance(error, TimeoutError) else "its process died"
            return self._failures.get(name)

    def start(self, scorer: RewardFunction | None = None) -> None:
        """Start the processes, if they do not run, for verifiers or for a user's function."""
        with self._lock:
            self._start(scorer)

    def close(self) -> None:
        """End the processes, all of them."""
        process, self._process = self._process, None
        self._loaded.clear()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, own: RewardFunction | None) -> None:
        """A user's function may read the folder that it is in, and its prints are shown; another folder takes other processes."""
        readable = [str(Path(own.path).parent)] if own is not None else []
        if self._process is not None and readable == self._readable:
            return
        self.close()
        self._readable = readable
        paths = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._scratch = tempfile.mkdtemp(prefix="sandbox-")
        if self.isolated and os.getuid() == 0:
            with contextlib.suppress(OSError):  # a rootless container may have no other user
                os.chown(self._scratch, isolation.NOBODY, isolation.NOBODY)
        how = {"isolated": self.isolated, "memory_gib": self.memory_gib, "scratch": self._scratch, "prints": own is not None}
        how["readable"] = readable
        alone = isolation.environment(paths, self._scratch)
        (requests, send), (receive, replies) = os.pipe(), os.pipe()
        self._channel = Channel(send, receive)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "serve.sandbox.keeper", json.dumps(how)],
            stdin=requests,
            stdout=replies,
            env=alone if self.isolated else os.environ | {"PYTHONPATH": alone["PYTHONPATH"]},
            start_new_session=True,
        )
        os.close(requests)
        os.close(replies)
        self.missing = self._ask(None, START_TIMEOUT_S)["missing"]

    def _load(self, scorer: str | RewardFunction) -> tuple[str, dict[str, Any] | None]:
        """Import the scorer outside the items' own time; returns its name, and a user's function."""
        own = None if isinstance(scorer, str) else scorer
        name = scorer if isinstance(scorer, str) else f"{scorer.path}:{scorer.name}"
        function = dataclasses.asdict(own) if own is not None else None
        self._start(own)
        if name not in self._loaded:
            message = {"load": name, "function": function, "timeout_s": START_TIMEOUT_S}
            reply = self._ask(message, START_TIMEOUT_S + BACKSTOP_S)
            if "error" in reply:  # also said with every item
                self._failures[name] = reply["error"]
            if "timeout" in reply or "died" in reply:
                raise TimeoutError if "timeout" in reply else BrokenPipeError
            self._loaded.add(name)
        return name, function

    def _ask(self, message: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """The reply to a message (or to the start); TimeoutError or BrokenPipeError after which the processes are gone."""
        assert self._channel is not None
        try:
            return self._channel.ask(message, timeout_s, self._abandoned)
        except (TimeoutError, BrokenPipeError):
            self.close()
            raise


def _read(score: Any) -> Scored:
    """A score as it came over the channel, where a pair is a list."""
    if isinstance(score, list) and len(score) == 2 and all(isinstance(one, float) for one in score):
        return score[0], score[1]
    return score if isinstance(score, float) else f"error: {score}"
