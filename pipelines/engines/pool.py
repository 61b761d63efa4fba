"""The engines as one: started together, each group to one of them, weights to all of them.

Every wait has a deadline. An engine that dies or hangs is started again by Ray, takes up the current weights by itself, and is
asked once more for what it still owes.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from pipelines.engines.config import EngineConfig, Sampling, environment
from pipelines.engines.engine import Engine
from pipelines.engines.self_critic import SelfCritic

CONCURRENT_BLOCKS = 256
POLL_S = 0.5

log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """An engine did not do what was asked of it, in time or at all."""


def cause_of_death(error: Exception) -> str:
    """What an actor's constructor raised, at the end of the traceback that Ray gives; else the first line of what Ray says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]+: ", line)]
    return " ".join(lines[raised[-1] :]) if "creation task" in lines[0] and raised else lines[0]


@dataclass(frozen=True)
class EnginePool:
    """Handles of long-lived engine actors; can be sent to any process of the cluster."""

    actors: list[ActorHandle]
    config: EngineConfig

    @classmethod
    def start(
        cls, model_path: str, dtype: str, max_model_len: int, config: EngineConfig, seed: int, weights_dir: str | None = None
    ) -> "EnginePool":
        """Create the actors; `wait_ready` tells when they can be used. `weights_dir` is where an engine that starts again looks."""
        remote: Any = ray.remote(concurrency_groups={"control": 4})(Engine)  # type: ignore[call-overload]
        remote = remote.options(
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus * config.tensor_parallel_size,
            max_concurrency=CONCURRENT_BLOCKS,
            max_restarts=config.max_restarts,
            runtime_env={"env_vars": environment(config)},
        )
        actors = [remote.remote(model_path, dtype, max_model_len, config, seed + i, weights_dir) for i in range(config.count)]
        return cls(actors, config)

    def wait_ready(self) -> None:
        """Block until every engine answers; EngineError after `start_timeout_s`."""
        self._ask("start", self._ping, range(len(self.actors)), self.config.start_timeout_s)

    def generate(
        self, rows: list[dict[str, Any]], sampling: Sampling, self_critic: SelfCritic | None = None
    ) -> list[dict[str, Any]]:
        """Completions of rows, in their order; every engine gets its share of the rows, a group never two engines."""
        shares: dict[int, list[int]] = {}
        for i in range(len(rows)):
            shares.setdefault((rows[0]["row_id"] + i) % len(self.actors), []).append(i)

        def call(engine: int) -> Any:
            return self.actors[engine].generate.remote([rows[i] for i in shares[engine]], sampling, self_critic)

        results = self._ask("generate", call, list(shares), self.config.request_timeout_s)
        completions: list[dict[str, Any]] = [{}] * len(rows)
        for engine, result in results.items():
            for i, completion in zip(shares[engine], result, strict=True):
                if completion["policy_version"] != rows[i]["policy_version"]:
                    raise EngineError(
                        f"row {rows[i]['row_id']} was sampled from weights version {completion['policy_version']}, "
                        f"but the plan asked for {rows[i]['policy_version']}."
                    )
                completions[i] = completion
        return completions

    def values(self, states: list[dict[str, Any]], self_critic: SelfCritic) -> list[float | None]:
        """The self-critic's value of each state, in their order."""
        count = len(self.actors)

        def call(engine: int) -> Any:
            return self.actors[engine].values.remote(states[engine::count], self_critic)

        answers = self._ask("values", call, range(count), self.config.request_timeout_s)
        return [answers[i % count][i // count] for i in range(len(states))]

    def self_critic_seconds(self) -> float:
        """Time spent on the self-critic's questions since the start, by the engine that spent most."""

        def call(engine: int) -> Any:
            return self.actors[engine].self_critic_seconds.options(concurrency_group="control").remote()

        return max(self._ask("report", call, range(len(self.actors)), self.config.sync_timeout_s).values())

    def load_weights(self, path: str, version: int, checksum: str) -> None:
        """Give all engines the weights of a folder: weights, version and prefix-cache reset in one call, confirmed by each."""

        def call(engine: int) -> Any:
            return self.actors[engine].load_weights.options(concurrency_group="control").remote(path, version, checksum)

        for confirmed in self._ask("weight sync", call, range(len(self.actors)), self.config.sync_timeout_s).values():
            if confirmed != {"version": version, "checksum": checksum}:
                raise EngineError(f"weights version {version} ({checksum}) were confirmed as {confirmed}.")

    def transfer(self, method: str, arguments: list[Any] | None = None) -> None:
        """Call a method of vLLM's weight transfer in all engines at the same time, with an argument for each or none."""

        def call(engine: int) -> Any:
            own = () if arguments is None else (arguments[engine],)
            return self.actors[engine].transfer.options(concurrency_group="control").remote(method, *own)

        self._ask(method, call, range(len(self.actors)), self.config.sync_timeout_s)

    def finish_transfer(self, version: int) -> list[dict[str, Any]]:
        """End a weight transfer in all engines; what each confirms."""

        def call(engine: int) -> Any:
            return self.actors[engine].finish_transfer.options(concurrency_group="control").remote(version)

        return list(self._ask("finish_transfer", call, range(len(self.actors)), self.config.sync_timeout_s).values())

    def stop(self) -> None:
        """End the actors."""
        for actor in self.actors:
            ray.kill(actor)

    def _ping(self, engine: int) -> Any:
        return self.actors[engine].version.options(concurrency_group="control").remote()

    def _ask(self, what: str, call: Callable[[int], Any], engines: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """The answer of each engine; one that died or ran out of time is started again and asked again."""
        answers: dict[int, Any] = {}
        failure = ""
        for attempt in range(self.config.max_restarts + 1):
            owing = [engine for engine in engines if engine not in answers]
            if attempt:
                self._revive(owing, failure)
            calls = {engine: call(engine) for engine in owing}
            done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
            for engine, ref in calls.items():
                try:
                    answers[engine] = ray.get(ref, timeout=0 if ref in done else 0.01)
                except GetTimeoutError:
                    failure = f"engine {engine} did not finish {what} within {timeout_s:g} s (cluster.engines sets the limit)"
                    if attempt < self.config.max_restarts:
                        ray.kill(self.actors[engine], no_restart=False)
                except RayActorError as error:
                    failure = f"engine {engine} died during {what} ({cause_of_death(error)})"
            if len(answers) == len(engines):
                return answers
            if attempt < self.config.max_restarts:
                log.warning("%s; it is started again.", failure)
        raise EngineError(
            f"{failure}, also after {self.config.max_restarts} new starts." if self.config.max_restarts else f"{failure}."
        )

    def _revive(self, engines: Sequence[int], failure: str) -> None:
        """Wait until engines that are being started again answer; until they do, calls to them fail at once."""
        deadline = time.monotonic() + self.config.start_timeout_s
        for engine in engines:
            while True:
                try:
                    ray.get(self._ping(engine), timeout=max(deadline - time.monotonic(), 0.1))
                    break
                except ActorUnavailableError:
                    time.sleep(POLL_S)
                except (GetTimeoutError, RayActorError) as error:
                    cause = cause_of_death(error)
                    again = "." if cause in failure else f": {cause}"
                    raise EngineError(f"{failure}, and it did not start again{again}") from error
                if time.monotonic() > deadline:
                    raise EngineError(f"{failure}, and it did not start again within {self.config.start_timeout_s:g} s.")
