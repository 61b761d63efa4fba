"""How every command starts and ends: `--help`, `--cfg job`, `--multirun`, and errors as one sentence."""

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ray
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pipelines.command import signals
from pipelines.command.cluster import ClusterError
from pipelines.config.compose import compose, resolved
from pipelines.trainer.failures import root_cause

OPTIONS = """
  key=value           set a value of the configuration; `--cfg job` prints all of them, conf/ says what each is
  --cfg job           print the composed configuration and end
  --multirun          run every combination of swept values (key=a,b), one after the other
  --config-dir DIR    a folder of your own beside conf/, laid out like it (DIR/algorithm/mine.yaml)
  --profile           record one step under torch's profiler (same as profile=true)"""


def command(
    module: str,
    arguments: list[str],
    usage: str,
    config_name: str,
    run: Callable[[dict[str, Any]], Any],
    compose: Callable[[list[str], str, str | None], DictConfig] = compose,
) -> int:
    """Compose the configuration and run; returns the exit status (2 for what the user can mend before anything starts).

    `module` is the one that a process of its own would start.
    """
    if "--help" in arguments or "-h" in arguments:
        print(usage.strip(), OPTIONS, sep="\n")
        return 0
    with signals.handled():
        return _command(module, arguments, config_name, run, compose)


def _command(
    module: str,
    arguments: list[str],
    config_name: str,
    run: Callable[[dict[str, Any]], Any],
    compose: Callable[[list[str], str, str | None], DictConfig],
) -> int:
    already_connected = ray.is_initialized()
    try:
        arguments, own_conf = _option(arguments, "--config-dir")
        arguments, printed = _option(arguments, "--cfg")
        arguments = ["profile=true" if argument == "--profile" else argument for argument in arguments]
        if arguments[:1] in (["--multirun"], ["-m"]):
            return multirun(module, arguments[1:], config_name, own_conf)
        composed = compose(arguments, config_name, own_conf)
        if printed is not None:
            print(OmegaConf.to_yaml(composed), end="")
            return 0
        run(resolved(composed))
        return 0
    except signals.Stopped as stopped:
        print(f"{stopped}", file=sys.stderr)
        return stopped.status
    except Exception as error:
        if os.environ.get("FULL_TRACEBACK"):
            raise
        mendable = isinstance(error, ValueError | LookupError | ClusterError)
        print(f"error: {error}" if mendable else f"error: {root_cause(error)}\n(FULL_TRACEBACK=1 shows where)", file=sys.stderr)
        return 2 if mendable else 1
    finally:
        if not already_connected:
            logging.getLogger("ray.serve").setLevel(logging.CRITICAL + 1)  # its threads would complain of the end that comes now
            ray.shutdown()


def _option(arguments: list[str], name: str) -> tuple[list[str], str | None]:
    """The arguments without an option, and its value if it is there."""
    if name not in arguments:
        return arguments, None
    at = arguments.index(name)
    if at + 1 == len(arguments):
        raise ValueError(f"{name}: give it a value; --help shows how.")
    return arguments[:at] + arguments[at + 2 :], arguments[at + 1]


def multirun(module: str, arguments: list[str], config_name: str, own_conf: str | None) -> int:
    """A process for each combination of swept values, one after the other; all are composed first. The worst exit status."""
    sweeps = combinations(arguments)
    for sweep in sweeps:
        resolved(compose(sweep, config_name, own_conf))
    options = ["--config-dir", own_conf] if own_conf is not None else []
    statuses = []
    for i, sweep in enumerate(sweeps, start=1):
        print(f"run {i} of {len(sweeps)}: {' '.join(sweep)}", flush=True)
        statuses.append(_passing_signals([sys.executable, "-m", module, *options, *sweep]))
    failed = [" ".join(sweep) for sweep, status in zip(sweeps, statuses, strict=True) if status]
    if failed:
        print(f"error: {len(failed)} of {len(sweeps)} runs failed: {'; '.join(failed)}", file=sys.stderr)
    return max(statuses)


def _passing_signals(command: list[str]) -> int:
    """Run a command to its end; what this process is told by a signal the command is told too. Its exit status."""
    child = subprocess.Popen(command, start_new_session=True)  # a terminal's interrupt would reach it twice
    try:
        return child.wait()
    except signals.Stopped as stopped:
        child.send_signal(stopped.signum)
        child.wait()
        raise


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
