"""How every command starts and ends: `--help`, `--cfg job`, and errors as one sentence."""

import os
import sys
from collections.abc import Callable
from typing import Any, cast

import ray
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.cluster import ClusterError
from pipelines.config import ConfigError, compose
from pipelines.progress import root_cause


def command(arguments: list[str], usage: str, config_name: str, run: Callable[[dict[str, Any]], Any]) -> int:
    """Compose the configuration and run; returns the exit status (2 for what the user can mend before anything starts)."""
    if "--help" in arguments or "-h" in arguments:
        print(usage.strip(), "`--cfg job` prints the composed configuration; see README.md.", sep="\n")
        return 0
    already_connected = ray.is_initialized()
    try:
        if "--cfg" in arguments:
            at = arguments.index("--cfg")
            print(OmegaConf.to_yaml(compose(arguments[:at] + arguments[at + 2 :], config_name)), end="")
            return 0
        run(resolved(compose(arguments, config_name)))
        return 0
    except Exception as error:
        if os.environ.get("FULL_TRACEBACK"):
            raise
        mendable = isinstance(error, ValueError | LookupError | ClusterError)
        print(f"error: {error}" if mendable else f"error: {root_cause(error)}\n(FULL_TRACEBACK=1 shows where)", file=sys.stderr)
        return 2 if mendable else 1
    finally:
        if not already_connected:
            ray.shutdown()


def resolved(composed: DictConfig) -> dict[str, Any]:
    """The configuration as plain values; ConfigError names a value that must be given."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}; give it as {key}=value") from error
