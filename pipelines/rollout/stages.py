"""What each stage of the rollout dataset does to a block: generate, judge, credit, deliver. Each adds columns and changes none."""

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from algorithms.base import Algorithm
from algorithms.types import Credit, Group
from pipelines.engines.config import Sampling
from pipelines.engines.pool import EnginePool
from pipelines.engines.self_critic import SelfCritic
from pipelines.rollout import schema
from pipelines.trainer.failures import root_cause
from pipelines.trainer.link import CoordinatorLink
from serve import typed_json
from serve.judge import JudgeConfig

NOT_JUDGED = {"reward": None, "acc": None, "status": "self_critic"}
CREDITED = ["n", "purpose", "reward", "truncated", "self_scored", "endpoint_value", "prefix_value"]

Record = Callable[..., None]  # tells the coordinator: the name of its method, and what that takes


def generate(
    table: pa.Table,
    engines: EnginePool,
    sampling: dict[str, Sampling],
    self_critic: SelfCritic | None = None,
    record: Record | None = None,
) -> pa.Table:
    """Stage 1: continue every row on the engines, with the self-critic's values; evaluation rows have a sampling of their own."""
    table = schema.check(table, "plan")
    if not table.num_rows:
        return schema.append(table, {name: [] for name, _ in schema.GENERATE}, "generate")
    rows = table.to_pylist()
    kinds = {"eval" if row["purpose"] == "eval" else "train" for row in rows}
    if len(kinds) > 1:
        raise schema.SchemaError("a block mixes evaluation rows with training rows.")
    with _span(record, "timing_s/gen", table):
        completions = engines.generate(rows, sampling[kinds.pop()], self_critic)
    return schema.append(table, {name: [one[name] for one in completions] for name, _ in schema.GENERATE}, "generate")


def judge_rows(table: pa.Table, config: JudgeConfig, record: Record | None = None, send_ids: bool = False) -> pa.Table:
    """Stage 2: one reward per continuation, or null with a status; never a 0 that no verifier gave.

    Ends that are the self-critic's are not judged. `send_ids`: reward functions of TRL's signature may ask for the token ids.
    """
    table = schema.check(table, "generate")
    columns = ("row_id", "data_source", "ground_truth", "extra_info", "response_text", "response_ids", "self_scored")
    validation = bool(table.num_rows) and table["purpose"][0].as_py() == "eval"
    items = [
        {"row_id": row, "data_source": source, **known, "response": text, "validation": validation}
        | ({"response_ids": ids} if send_ids else {})
        for row, source, truth, extra, texts, responses, owned in zip(*(table[name].to_pylist() for name in columns), strict=True)
        for known in [{"ground_truth": typed_json.loads(truth), "extra_info": typed_json.loads(extra)}]
        for text, ids, own in zip(texts, responses, owned, strict=True)
        if not own
    ]
    with _span(record, "timing_s/reward", table):
        answers = _ask_judge(items, config) if items else []
    if record is not None and answers and (usage := answers[0].get("usage")):
        record("record_counts", table["step"][0].as_py(), validation, usage)
    verdicts = iter(answers)
    groups = [[NOT_JUDGED if own else next(verdicts) for own in owned] for owned in table["self_scored"].to_pylist()]
    judged = {
        "reward": [[verdict["reward"] for verdict in group] for group in groups],
        "acc": [[verdict["acc"] for verdict in group] for group in groups],
        "reward_status": [[verdict["status"] for verdict in group] for group in groups],
    }
    return schema.append(table, judged, "judge")


def _ask_judge(items: list[dict[str, Any]], config: JudgeConfig) -> list[dict[str, Any]]:
    from serve.judge import handle

    reason = ""
    patience_s = config.request_timeout_s + len(items) * config.verifier_timeout_s / (config.sandboxes * config.min_replicas)
    for attempt in range(config.retries + 1):
        try:
            answer = handle().score_batch.remote(items, deadline_s=0.9 * patience_s)
            verdicts = answer.result(timeout_s=patience_s)
            if len(verdicts) == len(items):
                return verdicts
            reason = f"{len(verdicts)} verdicts for {len(items)} responses"
        except TimeoutError:
            answer.cancel()  # a retry shall not queue behind it
            reason = f"no answer within {patience_s:g} s"
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            time.sleep(min(2.0**attempt, 10.0))
    return [{"reward": None, "acc": None, "status": f"error: judge: {reason}"}] * len(items)


def credit(table: pa.Table, algorithm: Algorithm) -> pa.Table:
    """Stage 3: the algorithm's credit for each group, a column for each of its fields; evaluation and refill rows get none."""
    table, kind = schema.check(table, "judge"), algorithm.credit_type
    columns: dict[str, list[Any]] = {field.name: [] for field in dataclasses.fields(kind)}
    for row in table.select(CREDITED).to_pylist():
        if row["purpose"] in ("eval", "refill"):
            keep = row["purpose"] == "refill" and algorithm.trains_on_refills
            given = no_credit(kind, row["n"], keep)
        else:
            given = algorithm.credit(as_group(row))
        for name, values in columns.items():
            value = getattr(given, name)
            values.append(value.tolist() if isinstance(value, np.ndarray) else value)
    return schema.append(table, columns, "credit", kind)


def no_credit(kind: type[Credit], n: int, keep: bool) -> Credit:
    """A credit that teaches nothing: zeros, masks of nobody, and no numbers."""
    types = schema.credited(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        column = types.field(field.name).type
        lists = pa.types.is_list(column)
        fields[field.name] = np.zeros(n, bool if lists and pa.types.is_boolean(column.value_type) else float) if lists else None
    return kind(**fields | {"keep": keep})


def as_group(row: dict[str, Any]) -> Group:
    """A judged row as the algorithm sees it."""
    return Group(
        rewards=_floats(row["reward"]),
        truncated=np.array(row["truncated"]),
        values=_floats(row["endpoint_value"]),
        self_scored=np.array(row["self_scored"]),
        prefix_value=row["prefix_value"],
    )


def _floats(values: list[float | None]) -> np.ndarray:
    """Columns are float32; the shortest number that means the same is the one that was given (0.1 and not 0.10000000149)."""
    return np.array([np.nan if value is None else float(str(np.float32(value))) for value in values], dtype=float)


def deliver(table: pa.Table, coordinator: CoordinatorLink, credit_type: type[Credit] = Credit) -> pa.Table:
    """Stage 4: everything to the coordinator, and on to the trainer what it shall train on."""
    table = schema.check(table, "credit", credit_type)
    if not table.num_rows:
        return table
    coordinator.ask("ingest", table)
    return table.filter(table["keep"])


class StageError(RuntimeError):
    """What went wrong in a stage, in a sentence; `trace` is where."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message, trace)
        self.message, self.trace = message, trace

    def __str__(self) -> str:
        return self.message


class Stage:
    """A stage whose errors say which stage they are of, and survive the way to the trainer whole."""

    def __init__(self, name: str, work: Callable[[pa.Table], pa.Table]) -> None:
        self.name, self._work = name, work

    def __call__(self, table: pa.Table) -> pa.Table:
        try:
            return self._work(table)
        except Exception as error:
            raise StageError(f"stage {self.name}: {root_cause(error)}", traceback.format_exc()) from None


@contextmanager
def _span(record: Record | None, name: str, table: pa.Table) -> Iterator[None]:
    start = time.time()
    yield
    if record is not None and table.num_rows:
        record("record_span", name, table["step"][0].as_py(), table["purpose"][0].as_py() == "eval", start, time.time())
