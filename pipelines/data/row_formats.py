"""Rows of other frameworks, read as this project's (verl's): one adapter per format, applied row by row as the file is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TRUTH_COLUMNS = ("ground_truth", "answer", "solution", "label", "target")


@dataclass(frozen=True)
class RowFormat:
    """How to read the rows of a file; `conf/task/files.yaml` says what each key is."""

    name: str = "verl"
    input_key: str | None = None
    label_key: str | None = None
    data_source: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ADAPTERS:
            raise ValueError(f"format={self.name}: use one of {', '.join(ADAPTERS)}.")

    def adapt(self, row: dict[str, Any], identity: str) -> dict[str, Any]:
        """The row as verl has it; `identity` names rows that bring no id. LookupError names a missing column."""
        adapted = ADAPTERS[self.name](row, self)
        return {"problem_id": identity} | adapted


def _verl(row: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    """`data_source, prompt, reward_model.ground_truth, extra_info`; its id is `problem_id`, or made from `extra_info.index`."""
    named = {"data_source": form.data_source} if form.data_source is not None and not row.get("data_source") else {}
    adapted = {name: value for name, value in row.items() if value is not None} | named | _carried(row)
    extra = row.get("extra_info")
    if "problem_id" not in adapted and isinstance(extra, dict) and extra.get("index") is not None:
        adapted["problem_id"] = f"{adapted.get('data_source')}/{extra.get('split', '')}/{extra['index']}"
    return adapted


def _trl(row: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    """`prompt` (text or messages) and any columns, which a reward function of TRL's signature receives by name."""
    truth = form.label_key or next((name for name in TRUTH_COLUMNS if name in row), None)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return _common(row, form, "prompt", truth, columns, required_truth=form.label_key is not None)


def _openrlhf(row: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    """OpenRLHF and slime: a prompt under `input_key` (`input`), a truth under `label_key` (`label`), the rest as it is."""
    key, label = form.input_key or "input", form.label_key or "label"
    return _common(row, form, key, label, {name: value for name, value in row.items() if name not in (key, label)})


def _skyrl(row: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    """`prompt`, `env_class`, `reward_spec.ground_truth`; the environment's name is the data source of rows without one."""
    spec = _present(row, "reward_spec")
    if not isinstance(spec, dict) or spec.get("ground_truth") is None:
        raise LookupError("column 'reward_spec' has no 'ground_truth'")
    rest = {name: value for name, value in row.items() if name not in ("prompt", "reward_spec", "extra_info")}
    extra = rest | (row.get("extra_info") or {})
    source = row.get("data_source") or form.data_source or _present(row, "env_class")
    return {
        **_carried(row),
        "data_source": source,
        "prompt": _present(row, "prompt"),
        "reward_model": {"style": spec.get("method", "rule"), "ground_truth": spec["ground_truth"]},
        "extra_info": extra,
    }


def _common(
    row: dict[str, Any], form: RowFormat, key: str, label: str | None, extra: dict[str, Any], required_truth: bool = True
) -> dict[str, Any]:
    source = row.get("data_source") or form.data_source
    if source is None:
        raise LookupError("no column 'data_source', and data_source is not given for the file")
    truth = _present(row, label) if label is not None and (required_truth or row.get(label) is not None) else ""
    return {
        **_carried(row),
        "data_source": source,
        "prompt": _present(row, key),
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def _carried(row: dict[str, Any]) -> dict[str, Any]:
    """Optional columns that every format may have; TRL's distillation calls a critic's reference `privileged_context`."""
    carried = {name: row[name] for name in ("problem_id", "reference_solution", "tools") if row.get(name) is not None}
    if "reference_solution" not in carried and row.get("privileged_context") is not None:
        carried["reference_solution"] = row["privileged_context"]
    return carried


def _present(row: dict[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise LookupError(f"no column {name!r} (found {', '.join(sorted(row)) or 'none'})")
    return row[name]


ADAPTERS: dict[str, Callable[[dict[str, Any], RowFormat], dict[str, Any]]] = {
    "verl": _verl,
    "trl": _trl,
    "openrlhf": _openrlhf,
    "skyrl": _skyrl,
}
