"""The way to the coordinator, for all that run beside it."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

TIMEOUT_S = 300.0  # the longest call is a step's end, which writes its rollouts and the replay buffer


@dataclass(frozen=True)
class CoordinatorLink:
    """Can be sent to any process of the cluster; every call has a deadline."""

    actor: ActorHandle

    def ask(self, method: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Call the coordinator and wait for its answer; GetTimeoutError after `timeout_s`."""
        return ray.get(getattr(self.actor, method).remote(*arguments), timeout=timeout_s)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the coordinator and do not wait."""
        getattr(self.actor, method).remote(*arguments)
