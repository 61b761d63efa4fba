"""The way to the coordinator, for all that run beside it."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

TIMEOUT_S = 300.0  # the longest call is a step's end, which writes its rollouts and the replay buffer


class CoordinatorDied(RuntimeError):
    """The process that holds all of a run but its weights is gone; the newest checkpoint has what it held."""


@dataclass(frozen=True)
class CoordinatorLink:
    """Can be sent to any process of the cluster; every call has a deadline."""

    actor: ActorHandle

    def ask(self, method: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Call the coordinator and wait for its answer; TimeoutError after `timeout_s`, CoordinatorDied if it is gone."""
        try:
            return ray.get(getattr(self.actor, method).remote(*arguments), timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError(f"the coordinator did not answer {method!r} within {timeout_s:g} s.") from None
        except RayActorError as error:
            if error.actor_init_failed:
                raise RuntimeError(f"the coordinator could not start: {str(error).strip().splitlines()[-1]}") from error
            raise CoordinatorDied(f"the coordinator died ({str(error).splitlines()[0]})") from None

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the coordinator and do not wait."""
        getattr(self.actor, method).remote(*arguments)
