"""A resumed run is the run it was: its configuration is the one in its folder, with what the command line changes."""

import sys
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from pipelines.command.progress import table
from pipelines.config.compose import compose
from pipelines.config.make import ConfigError
from pipelines.config.run import absolute_paths
from pipelines.store import run_folder

Change = tuple[str, Any, Any]

# What may be another after a resume. The rest is the meaning of the run, and what its checkpoints belong to.
FREE = (
    *("steps", "evaluation.", "checkpoint.", "tracking.", "cluster.", "optimizer.", "algorithm.critic.lr"),
    *("keep_rollouts", "max_missing_reward", "logprob_diff_alarm", "profile", "resume", "stop_grace_s"),
)
REASONS = {
    "algorithm": "another algorithm would go on from this one's state",
    "model": "the checkpoints hold another model",
    "task": "the run's place in its data would mean something else",
    "seed": "the next batch would not be the one that comes next",
}


def compose_run(overrides: list[str], config_name: str = "config", own_conf: str | None = None) -> DictConfig:
    """As `compose`; with `resume`, the run's own configuration with the keys that the overrides change.

    The changes are shown; ConfigError names one that a resumed run cannot take.
    """
    composed = compose(overrides, config_name, own_conf)
    if composed.resume is None:
        return composed
    stored = run_folder.read_config(run_folder.of(composed.resume))
    asked, plain = (leaves(_plain(one)) for one in (composed, compose([], config_name, own_conf)))
    named = tuple(override.lstrip("+~").partition("=")[0] for override in overrides)
    chosen = {key for key in asked if asked[key] != plain.get(key, ...) or _is_named(key, named)} - {"resume"}
    went_on = leaves(stored) | {key: asked[key] for key in chosen}
    changes = differences(stored, nested(went_on))
    for key, old, new in changes:
        if not key.startswith(FREE):
            why = REASONS.get(key.partition(".")[0], "it is part of what the run is")
            raise ConfigError(
                f"resume={composed.resume}: {key} was {old!r} and cannot become {new!r}, as {why}; leave it out, or begin a run of "
                f"its own with branch_from={composed.resume}."
            )
    if changes:
        print(f"resumed with changes:\n{table([(key, f'{old} -> {new}') for key, old, new in changes])}", file=sys.stderr)
    return OmegaConf.create(nested(went_on | {"resume": composed.resume}))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Keys whose values differ, with both; a key that one of them lacks is None there. `resume` and `branch_from` do not count."""
    before, after = leaves(old), leaves(new)
    keys = [key for key in sorted(before | after) if key not in ("resume", "branch_from")]
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def _plain(composed: DictConfig) -> dict[str, Any]:
    """Plain values; what must still be given stays `???`, as a resumed run has it."""
    return absolute_paths(cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)))


def _is_named(key: str, named: tuple[str, ...]) -> bool:
    """Whether an override names a key, or the group that it is in."""
    return any(key == one or key.startswith(f"{one}.") for one in named)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The opposite of `leaves`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        inner = tree
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[name] = value
    return tree
