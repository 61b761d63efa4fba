"""How every command starts and ends: `--help`, `--cfg job`, `--multirun`, and errors as one sentence."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import ray
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.command.cluster import ClusterError
from pipelines.command.progress import root_cause
from pipelines.config.run import ConfigError, compose


def command(arguments: list[str], usage: str, config_name: str, run: Callable[[dict[str, Any]], Any]) -> int:
    """Compose the configuration and run; returns the exit status (2 for what the user can mend before anything starts)."""
    if "--help" in arguments or "-h" in arguments:
        print(
            usage.strip(),
            "`--cfg job` prints the composed configuration, `--multirun key=a,b` runs one after the other; see README.md.",
            sep="\n",
        )
        return 0
    already_connected = ray.is_initialized()
    try:
        if "--cfg" in arguments:
            at = arguments.index("--cfg")
            print(OmegaConf.to_yaml(compose(arguments[:at] + arguments[at + 2 :], config_name)), end="")
            return 0
        if arguments[:1] in (["--multirun"], ["-m"]):
            return multirun(arguments[1:], config_name)
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


def multirun(arguments: list[str], config_name: str) -> int:
    """A process for each combination of swept values, one after the other; all are composed first. The worst exit status."""
    sweeps = combinations(arguments)
    for sweep in sweeps:
        resolved(compose(sweep, config_name))
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "commands are started as modules"
    statuses = []
    for i, sweep in enumerate(sweeps, start=1):
        print(f"run {i} of {len(sweeps)}: {' '.join(sweep)}", flush=True)
        statuses.append(subprocess.run([sys.executable, "-m", spec.name, *sweep]).returncode)
    failed = [" ".join(sweep) for sweep, status in zip(sweeps, statuses, strict=True) if status]
    if failed:
        print(f"error: {len(failed)} of {len(sweeps)} runs failed: {'; '.join(failed)}", file=sys.stderr)
    return max(statuses)


def combinations(arguments: list[str]) -> list[list[str]]:
    """Every choice of one value for each argument that sweeps several, in Hydra's grammar (`a,b`, `range(1,4)`, `glob(*)`)."""
    overrides = OverridesParser.create().parse_overrides(arguments)
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.input_line or ""]
        for override in overrides
    ]
    return [list(chosen) for chosen in itertools.product(*choices)]


def resolved(composed: DictConfig) -> dict[str, Any]:
    """The configuration as plain values; ConfigError names a value that must be given."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}; give it as {key}=value") from error
