"""Sandboxes that share the work of a judge: one slow answer costs itself, and a batch waits no longer than it must."""

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from serve.reward_function import RewardFunction, Scored
from serve.sandbox import Sandbox

TRIES_S = (1.0, 3.0)  # a verifier's first clocks, before the whole one
NO_TURN = "timeout: its turn did not come in the time of its batch"

Scores = list[Scored]


@dataclass
class Job:
    """Items that are scored together, and what came of them."""

    scorer: str | RewardFunction
    items: list[dict[str, Any]]
    scores: Scores

    @property
    def late(self) -> bool:
        return all(isinstance(score, str) and score.startswith("timeout") for score in self.scores)


@dataclass
class Patience:
    """The time that a try of a batch may lose to clocks that run out."""

    left_s: float


class SandboxPool:
    """Scores jobs, each on the sandbox that is free first."""

    def __init__(self, size: int, timeout_s: float, memory_gib: float, isolated: bool = True) -> None:
        self.timeout_s = timeout_s
        self._sandboxes = [Sandbox(timeout_s, memory_gib, isolated) for _ in range(size)]
        self._free: asyncio.Queue[Sandbox] = asyncio.Queue()
        for sandbox in self._sandboxes:
            self._free.put_nowait(sandbox)
        self._threads = ThreadPoolExecutor(size, "sandbox")

    async def score(self, jobs: list[tuple[str | RewardFunction, list[dict[str, Any]]]], deadline_s: float) -> list[Scores]:
        """Scores in the order of the jobs; what is not done by the deadline is a timeout, and its work is given up.

        A verifier that is slow waits until all others of its batch have been scored, and is then tried again with a longer clock.
        Later tries lose at most the clock of one response for each sandbox, however many answers are endless. A reward function of
        the user's is called once; of an async batch that an item has blocked the items are called again, each alone.
        """
        ends = time.monotonic() + deadline_s
        every = [Job(scorer, items, [NO_TURN] * len(items)) for scorer, items in jobs]
        verifiers = [job for job in every if isinstance(job.scorer, str)]
        functions = [job for job in every if not isinstance(job.scorer, str)]
        await self._try(functions, self.timeout_s, ends)
        await self._one_by_one([job for job in functions if job.late and len(job.items) > 1], ends)
        patience = math.inf
        for clock in [*(clock for clock in TRIES_S if clock < self.timeout_s), self.timeout_s]:
            await self._try([job for job in verifiers if job.late], clock, ends, patience)
            patience = self.timeout_s * len(self._sandboxes)
        return [job.scores for job in every]

    async def _one_by_one(self, jobs: list[Job], ends: float) -> None:
        for job in jobs:
            if isinstance(job.scorer, RewardFunction) and job.scorer.signature == "verl":
                alone = [Job(job.scorer, [item], [NO_TURN]) for item in job.items]
                await self._try(alone, self.timeout_s, ends)
                job.scores = [score for one in alone for score in one.scores]

    async def _try(self, jobs: list[Job], clock: float, ends: float, patience: float = math.inf) -> None:
        """Score jobs until then; those that are not done are cancelled and keep the scores that they had."""
        if not jobs or time.monotonic() >= ends:
            return
        left = Patience(patience)
        tasks = [asyncio.create_task(self._score(job, clock, left)) for job in jobs]
        try:
            await asyncio.wait(tasks, timeout=max(ends - time.monotonic(), 0.0))
        finally:  # also when the caller has given up
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(self, job: Job, clock: float, patience: Patience) -> None:
        sandbox = await self._free.get()
        try:
            if patience.left_s <= 0:
                return
            abandoned = threading.Event()
            arguments = (job.scorer, job.items, clock, abandoned)
            work = asyncio.get_running_loop().run_in_executor(self._threads, sandbox.score, *arguments)
            try:
                job.scores = await asyncio.shield(work)
            except asyncio.CancelledError:
                abandoned.set()
                await asyncio.wait([work])
                raise
            if job.late:
                patience.left_s -= clock
        finally:
            self._free.put_nowait(sandbox)

    async def missing(self, own: RewardFunction | None) -> list[str]:
        """What this machine cannot keep from a scorer: network, files, processes; nothing where isolation is off.

        It starts a sandbox, for verifiers or for a user's function.
        """
        sandbox = await self._free.get()
        try:
            await asyncio.to_thread(sandbox.start, own)
            return sandbox.missing
        finally:
            self._free.put_nowait(sandbox)

    def close(self) -> None:
        """End all processes."""
        for sandbox in self._sandboxes:
            sandbox.close()
