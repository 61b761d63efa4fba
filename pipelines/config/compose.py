"""Composing a configuration from `conf/` and the command line, with every override accounted for."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.config.make import ConfigError
from pipelines.store.tracker import flatten

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ("algorithm", "task", "model", "cluster", "experiment", "recipe")


def compose(overrides: list[str], config_name: str = "config", own_conf: str | None = None) -> DictConfig:
    """Compose `conf/` (and a folder of the user's own laid out like it) with command-line overrides.

    ConfigError names near matches of a mistyped key or choice, and overrides that would have no effect.
    """
    folders = [CONF, *([Path(own_conf).resolve()] if own_conf is not None else [])]
    searched = [f"hydra.searchpath=[file://{folder}]" for folder in folders[1:]]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        _check_choices(overrides, folders)
        choices = [override for override in overrides if _group(override) is not None]
        try:
            known = hydra_compose(config_name, [*searched, *choices])
            values = [override for override in overrides if override not in choices]
            given = {override.lstrip("+").partition("=")[0] for override in values}
            _check_shadowed(choices, given, known, config_name, searched, folders)
            _check_keys(values, known)
            return hydra_compose(config_name, [*searched, *overrides]) if values else known
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(str(error).splitlines()[0]) from error


def resolved(composed: DictConfig) -> dict[str, Any]:
    """The configuration as plain values; ConfigError names a value that must be given."""
    try:
        return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}; give it as {key}=value") from error


def _group(override: str) -> str | None:
    """The group that an override chooses from, if it does."""
    name = override.partition("=")[0].lstrip("+~")
    return name if name in GROUPS else None


def _check_choices(overrides: list[str], folders: list[Path]) -> None:
    for override in overrides:
        group, equals, choice = override.partition("=")
        if group not in GROUPS or not equals:
            continue
        known = sorted(file.stem for folder in folders for file in (folder / group).glob("*.yaml"))
        if choice not in (*known, "null"):
            near = get_close_matches(choice, known, n=3, cutoff=0.4) or known
            raise ConfigError(f"{group}={choice}: there is no such file in conf/{group}; did you mean {', '.join(near)}?")


def _check_shadowed(
    choices: list[str], given: set[str], known: DictConfig, config_name: str, searched: list[str], folders: list[Path]
) -> None:
    """ConfigError where an experiment sets what a file chosen beside it is there to set: the choice would have no effect."""
    chosen = {_group(choice): choice.partition("=")[2] for choice in choices}
    if chosen.get("experiment") in (None, "null"):
        return
    plain: DictConfig | None = None
    for group, name in chosen.items():
        own = _own_keys(folders, group, name) if group not in (None, "experiment") else []
        if own and plain is None:
            plain = hydra_compose(config_name, [*searched, *(one for one in choices if _group(one) != "experiment")])
        for key in own:
            shown, meant = (_raw(config, f"{group}.{key}") for config in (known, plain))
            if shown != meant and f"{group}.{key}" not in given:
                raise ConfigError(
                    f"experiment={chosen['experiment']} sets {group}.{key}={shown} where {group}={name} sets {meant}, so that part "
                    f"of {group}={name} would have no effect: give {group}.{key}= yourself, or leave out one of the two."
                )


def _own_keys(folders: list[Path], group: str | None, name: str) -> list[str]:
    """What a choice's file itself sets. A root algorithm's are defaults for experiments to change; a variant's are what it is."""
    file = next(file for folder in reversed(folders) if (file := folder / str(group) / f"{name}.yaml").is_file())
    tree = yaml.safe_load(file.read_text()) or {}
    parents = tree.pop("defaults", ["_self_"])
    return [] if group == "algorithm" and parents == ["_self_"] else list(flatten(tree))


def _raw(config: DictConfig | None, key: str) -> Any:
    return flatten(cast(dict[str, Any], OmegaConf.to_container(cast(Any, config), resolve=False))).get(key)


def _check_keys(overrides: list[str], known: DictConfig) -> None:
    container = cast(dict[str, Any], OmegaConf.to_container(known, resolve=False))
    keys = set(flatten(container)) | set(GROUPS)
    inner = {".".join(key.split(".")[:i]) for key in keys for i in range(1, key.count(".") + 1)}
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        if not equals:
            raise ConfigError(f"{override}: arguments are key=value; `--cfg job` prints all keys.")
        if key.startswith("~") or key in keys | inner or any(key.startswith(f"{open_key}.") for open_key in _open(container)):
            continue
        near = get_close_matches(key, sorted(keys), n=3, cutoff=0.6)
        near = near or [k for k in sorted(keys) if k.rpartition(".")[2] == key.rpartition(".")[2]][:3]
        raise ConfigError(
            f"{key}: no such key; " + (f"did you mean {', '.join(near)}?" if near else "`--cfg job` prints all keys.")
        )


def _open(container: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys that hold a mapping of the user's own making (written as `{}`)."""
    found = []
    for name, value in container.items():
        if isinstance(value, dict):
            found += [f"{prefix}{name}"] if not value else _open(value, f"{prefix}{name}.")
    return found
