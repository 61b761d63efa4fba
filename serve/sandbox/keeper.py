"""The sandbox's own processes: a keeper that evaluates nothing, and the worker that it forks, kills and forks again.

The keeper confines itself, imports what verifiers need, and forks a worker that scores. A worker that takes too long or dies is
killed with all that it started, and the next is there within milliseconds, as nothing has to be imported again.
"""

import json
import os
import signal
import sys
from typing import Any

from serve import typed_json
from serve.reward_function import RewardFunction, call
from serve.sandbox import isolation
from serve.sandbox.channel import Channel

GRACE_S = 0.5  # beyond the items' time, for an async function to say which of them took too long


class Keeper:
    """Answers one request at a time."""

    def __init__(self, start: dict[str, Any], processes: int) -> None:
        self.memory_bytes, self.processes = int(start["memory_gib"] * 2**30), processes
        self.isolated = start["isolated"]
        self.functions: dict[str, tuple[Any, str | None]] = {}  # the function, and its signature if it is a user's
        self.worker = 0
        self.channel: Channel | None = None  # to the worker, while there is one

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; a worker that gave none is gone."""
        if "load" in message and message["function"] is None:
            self.end_worker()  # the next one has it from the start
            return reply_to(self.functions, message)
        waits = "scorer" in message and message["function"] is not None and message["function"]["is_async"]
        reply = self.ask(message, message["timeout_s"] + (GRACE_S if waits else 0.0))
        if "timeout" in reply or "died" in reply:
            self.end_worker()
        return reply

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Hand a request to the worker and wait for its reply."""
        if self.channel is None:
            self.channel = self.fork_worker()
        try:
            return self.channel.ask(message, timeout_s)
        except TimeoutError:
            return {"timeout": True}
        except BrokenPipeError:
            return {"died": True}

    def fork_worker(self) -> Channel:
        """A worker with pipes of its own, which programs that it starts do not inherit."""
        (their_requests, requests), (replies, their_replies) = os.pipe(), os.pipe()
        self.worker = os.fork()
        if not self.worker:
            os.setsid()
            isolation.die_with_parent()
            os.closerange(3, min(their_requests, their_replies, requests, replies))
            os.close(requests)
            os.close(replies)
            if self.isolated:
                isolation.limit_resources(self.memory_bytes, self.processes)
            work(self.functions, their_requests, their_replies)
            os._exit(0)
        os.close(their_requests)
        os.close(their_replies)
        return Channel(requests, replies)

    def end_worker(self) -> None:
        """Kill the worker with all that it started, children that left its group included where there is a namespace."""
        if self.channel is None:
            return
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(self.worker, signal.SIGKILL)
        os.waitpid(self.worker, 0)
        while os.getpid() == 1 and _reaped():
            pass
        self.channel.close()
        self.channel = None


def _reaped() -> bool:
    """Wait for an orphan that was killed; False if none is left."""
    try:
        os.waitpid(-1, 0)
        return True
    except ChildProcessError:
        return False


def work(functions: dict[str, tuple[Any, str | None]], requests: int, replies: int) -> None:
    """The worker: read, score, reply."""
    for line in os.fdopen(requests, "rb"):
        message = typed_json.loads(line)
        isolation.limit_cpu(message["timeout_s"])
        data = memoryview(json.dumps(reply_to(functions, message)).encode() + b"\n")
        while data:
            data = data[os.write(replies, data) :]


def reply_to(functions: dict[str, tuple[Any, str | None]], message: dict[str, Any]) -> dict[str, Any]:
    """Load a scorer, or score items with one."""
    try:
        if "load" in message:
            functions[message["load"]] = load(message["load"], message["function"])
            return {}
        if message["scorer"] not in functions:  # a worker that died took a user's function with it
            functions[message["scorer"]] = load(message["scorer"], message["function"])
        function, signature = functions[message["scorer"]]
        if signature is not None:
            return {"scores": call(function, signature, message["items"], message["timeout_s"])}
        return {"scores": [function(item) for item in message["items"]]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def load(name: str, function: dict[str, Any] | None) -> tuple[Any, str | None]:
    """A verifier by its data source, or a user's function from its source."""
    from serve.verifiers import find

    if function is None:
        verifier = find(name)
        verifier.load()
        return verifier.score, None
    own = RewardFunction(**function)
    return own.load(), own.signature


def main() -> None:
    """Confine this process, then answer requests until there are no more."""
    start = json.loads(sys.argv[1])
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)  # code that reads its input finds the end of it at once
    os.dup2(2 if start["prints"] else nothing, 1)
    if not start["prints"]:
        os.dup2(nothing, 2)
    processes = isolation.most_processes()  # while they can still be counted
    missing = confine(start) if start["isolated"] else []
    keeper = Keeper(start, processes)
    send = os.fdopen(replies, "wb", buffering=0)
    send.write(json.dumps({"missing": missing}).encode() + b"\n")
    for line in os.fdopen(requests, "rb"):
        send.write(json.dumps(keeper.answer(typed_json.loads(line))).encode() + b"\n")
    keeper.end_worker()


def confine(start: dict[str, Any]) -> list[str]:
    """Isolate this process as far as the machine allows; what it could not do, by name."""
    missing = []
    if isolation.enter_namespaces():
        child = os.fork()
        if child:  # the first process of the namespace is the child; this one stays to be killed, and to end with it
            os.closerange(0, 256)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        isolation.bound_scratch(start["scratch"])
    else:
        missing += ["network", "processes"]
    isolation.become_nobody()
    isolation.die_with_parent()
    if not isolation.restrict_files(start["readable"], start["scratch"]):
        missing.append("files")
    return missing


if __name__ == "__main__":
    main()
