"""Commands as a user starts them, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed import free_port

DEADLINE_S = 420
ONE_ENGINE = "cluster.engines.count=1"  # starting a second takes longer than it saves in a short run
SMALL = [
    "algorithm.problems_per_step=8",
    "algorithm.group_size=4",
    "task.train.count=64",
    "task.validation.count=8",
    "evaluation.every=4",
    "evaluation.n=2",
    "checkpoint.every=2",
    "tracking.system_metrics=false",
]


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments, f"cluster.judge.http_port={free_port()}"]


def alone() -> dict[str, str]:
    """The environment of a command that starts a cluster of its own, which ends with it."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def run(module: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command(module, *arguments), capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def killed_after(file: Path, log: Path, module: str, *arguments: str) -> None:
    """Start a command on a cluster of its own, wait for a file that it writes, and kill it with SIGKILL."""
    with open(log, "w") as stream:
        process = subprocess.Popen(command(module, *arguments), stdout=stream, stderr=stream, env=alone())
    deadline = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
