"""The replay buffer at the paper's scale: `python -m tests.benchmarks.replay_buffer [--tokens 50000]`

For 256 trajectories (the main run's buffer) and 1,920 (the stale variant's), of 50,000 tokens each, appended 192 at a time: seconds
to append, to draw and cut 192 prefixes, and to open the buffer again in a new process; bytes on disk, and the largest resident
memory of each process beyond what it had before.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from algorithms.replay import Replay
from algorithms.types import Problem
from pipelines.store.replay_buffer import ReplayBuffer, read_index
from pipelines.store.trajectories import SCHEMA

PREFIXES = 192


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rows(first: int, count: int, tokens: int) -> pa.Table:
    """Trajectories of random tokens."""
    rng = np.random.default_rng(first)
    fixed = {"data_source": "proofs", "ground_truth": "", "extra_info": "{}", "prompt_ids": list(range(300)), "prefix_len": 0}
    fixed |= {
        "finish_reason": "stop",
        "reward": 0.5,
        "reward_status": "ok",
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "seed": 0,
    }
    made = [
        fixed
        | {
            "problem_id": f"p{first + i}",
            "step": first // PREFIXES,
            "response_length": tokens,
            "response_ids": rng.integers(0, 151_936, tokens, dtype=np.int32),
            "rollout_logprobs": rng.standard_normal(tokens, dtype=np.float32),
            "policy_versions": [{"start": 0, "version": 1}],
        }
        for i in range(count)
    ]
    return pa.Table.from_pylist(made, schema=pa.schema([f for f in SCHEMA if f.name not in ("sequence", "tokenizer_hash")]))


class State:
    """What a plan sees: the buffer, and a generator."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer, self.rng = buffer, np.random.default_rng(0)
        self.trajectories, self.prefix = buffer.trajectories, buffer.prefix

    def problem(self, problem_id: str) -> Problem:
        return Problem(problem_id, "proofs", [1], "")


def child(action: str, url: str, capacity: int, tokens: int) -> dict[str, float]:
    """One action in a process of its own: seconds and memory."""
    before = resident_mib()
    start = time.perf_counter()
    if action == "append":
        buffer = ReplayBuffer(url, capacity, "tokenizer")
        appended, spent = 0, 0.0
        while appended < capacity:
            batch = rows(appended, min(PREFIXES, capacity - appended), tokens)
            began = time.perf_counter()
            buffer.append(batch)
            spent += time.perf_counter() - began
            appended += batch.num_rows
        return {"seconds": spent, "mib": resident_mib() - before}
    buffer = ReplayBuffer(url, capacity, "tokenizer", read_index(url))
    opened = time.perf_counter() - start
    replay = Replay(capacity, PREFIXES, 10_000, 0.9)
    began = time.perf_counter()
    states = replay.states(State(buffer), PREFIXES)
    return {
        "open": opened,
        "sample": time.perf_counter() - began,
        "prefix_tokens": sum(len(prefix) for _, prefix in states),
        "mib": resident_mib() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--child", nargs=3, metavar=("ACTION", "URL", "CAPACITY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child[0], args.child[1], int(args.child[2]), args.tokens)))
        return
    print("trajectories    append   per 192   restart  sample 192    on disk  append mem  sample mem")
    for capacity in (256, 1920):
        with tempfile.TemporaryDirectory() as folder:
            results = {}
            for action in ("append", "sample"):
                command = [sys.executable, "-m", "tests.benchmarks.replay_buffer", "--tokens", str(args.tokens)]
                done = subprocess.run(
                    [*command, "--child", action, folder, str(capacity)], capture_output=True, text=True, check=True
                )
                results[action] = json.loads(done.stdout.strip().splitlines()[-1])
            size = sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20
        append, sample = results["append"], results["sample"]
        print(
            f"{capacity:>12}{append['seconds']:>9.1f}s{append['seconds'] * PREFIXES / capacity:>9.1f}s{sample['open']:>9.2f}s"
            f"{sample['sample']:>11.2f}s{size:>7.0f} MiB{append['mib']:>8.0f} MiB{sample['mib']:>8.0f} MiB"
        )


if __name__ == "__main__":
    main()
