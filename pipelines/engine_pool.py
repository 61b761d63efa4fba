"""The engines as one: started together, each group to one of them, weights to all of them, every wait with a deadline."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError

from pipelines.engine import Engine, EngineConfig, Sampling, environment

CONCURRENT_BLOCKS = 256


class EngineError(RuntimeError):
    """An engine did not do what was asked of it, in time or at all."""


@dataclass(frozen=True)
class EnginePool:
    """Handles of long-lived engine actors; can be sent to any process of the cluster."""

    actors: list[ActorHandle]
    config: EngineConfig

    @classmethod
    def start(cls, model_path: str, dtype: str, max_model_len: int, config: EngineConfig, seed: int) -> "EnginePool":
        """Create the actors; `wait_ready` tells when they can be used."""
        remote: Any = ray.remote(concurrency_groups={"control": 2})(Engine)  # type: ignore[call-overload]
        remote = remote.options(
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus * config.tensor_parallel_size,
            max_concurrency=CONCURRENT_BLOCKS,
            runtime_env={"env_vars": environment(config)},
        )
        return cls([remote.remote(model_path, dtype, max_model_len, config, seed + i) for i in range(config.count)], config)

    def wait_ready(self) -> None:
        """Block until every engine answers; EngineError after `start_timeout_s`."""
        self._all("start", [actor.version.remote() for actor in self.actors], self.config.start_timeout_s)

    def generate(self, rows: list[dict[str, Any]], sampling: Sampling) -> list[dict[str, Any]]:
        """Completions of rows, in their order; every engine gets its share of the rows, a group never two engines."""
        shares: dict[int, list[int]] = {}
        for i in range(len(rows)):
            shares.setdefault((rows[0]["row_id"] + i) % len(self.actors), []).append(i)
        calls = [self.actors[at].generate.remote([rows[i] for i in share], sampling) for at, share in shares.items()]
        results = self._all("generate", calls, self.config.request_timeout_s)
        completions: list[dict[str, Any]] = [{}] * len(rows)
        for share, result in zip(shares.values(), results, strict=True):
            for i, completion in zip(share, result, strict=True):
                if completion["policy_version"] != rows[i]["policy_version"]:
                    raise EngineError(
                        f"row {rows[i]['row_id']} was sampled from weights version {completion['policy_version']}, "
                        f"but the plan asked for {rows[i]['policy_version']}."
                    )
                completions[i] = completion
        return completions

    def load_weights(self, path: str, version: int, checksum: str) -> None:
        """Give all engines the weights of a folder: weights, version and prefix-cache reset in one call, confirmed by each."""
        calls = [actor.load_weights.options(concurrency_group="control").remote(path, version, checksum) for actor in self.actors]
        for confirmed in self._all("weight sync", calls, self.config.sync_timeout_s):
            if confirmed != {"version": version, "checksum": checksum}:
                raise EngineError(f"weights version {version} ({checksum}) were confirmed as {confirmed}.")

    def stop(self) -> None:
        """End the actors."""
        for actor in self.actors:
            ray.kill(actor)

    def _all(self, what: str, calls: list[Any], timeout_s: float) -> list[Any]:
        try:
            return ray.get(calls, timeout=timeout_s)
        except GetTimeoutError:
            raise EngineError(f"engine {what} did not finish within {timeout_s:g} s (cluster.engines sets the limit).") from None
