"""The rollout dataset: source -> generate -> judge -> credit -> deliver, executed anew for each round of each step.

Engines and judge outlive the passes; the stages are light tasks that call them. Ray Data fuses the stages of a block, so a block's
groups are judged and handed over while other blocks still generate.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.data import Dataset
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from algorithms.contract import Algorithm
from algorithms.types import Credit, Group
from pipelines.engines.engine import Sampling
from pipelines.engines.pool import EnginePool
from pipelines.engines.self_critic import CriticQueries
from pipelines.rollout import schema
from pipelines.rollout.metrics import nested_lengths
from serve.judge import JudgeConfig

COORDINATOR_TIMEOUT_S = 120.0
NOT_JUDGED = {"reward": None, "status": "critic"}
CREDITED = ["n", "purpose", "reward", "finish_reason", "from_critic", "endpoint_value", "prefix_value"]
STAGE_CPUS = 0.05  # stages wait more than they work

Record = Callable[[str, int, bool, float, float], None]  # stage, step, whether an evaluation, start, end


class PlannedRows(Datasource):
    """Read tasks that ask the coordinator for their share of the rows planned last."""

    def __init__(self, coordinator: ActorHandle, blocks: int) -> None:
        self._coordinator, self._blocks = coordinator, blocks

    def get_name(self) -> str:
        return "PlannedRows"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [
            ReadTask(partial(_read_block, self._coordinator, i, self._blocks), metadata, schema=schema.STAGES["plan"])
            for i in range(self._blocks)
        ]


def _read_block(coordinator: ActorHandle, block: int, blocks: int) -> list[pa.Table]:
    return [ray.get(coordinator.rows.remote(block, blocks), timeout=COORDINATOR_TIMEOUT_S)]


def rollout_dataset(
    coordinator: ActorHandle,
    engines: EnginePool,
    judge: JudgeConfig,
    algorithm: Algorithm,
    sampling: dict[str, Sampling],
    blocks: int,
    critic: CriticQueries | None = None,
    send_ids: bool = False,
) -> Dataset:
    """The dataset that a trainer iterates: each pass rolls out what the coordinator planned last."""
    record = partial(_record, coordinator)
    return (
        judged_dataset(
            ray.data.read_datasource(PlannedRows(coordinator, blocks), override_num_blocks=blocks, **_resources()),
            engines,
            judge,
            sampling,
            critic,
            record,
            send_ids,
        )
        .map_batches(partial(credit, algorithm=algorithm), **_batches())
        .map_batches(partial(deliver, coordinator=coordinator), **_batches())
    )


def judged_dataset(
    rows: Dataset,
    engines: EnginePool,
    judge: JudgeConfig,
    sampling: dict[str, Sampling],
    critic: CriticQueries | None = None,
    record: Record | None = None,
    send_ids: bool = False,
) -> Dataset:
    """Planned rows, generated and judged."""
    stage = partial(generate, engines=engines, sampling=sampling, critic=critic, record=record)
    return rows.map_batches(stage, **_batches()).map_batches(
        partial(judge_rows, config=judge, record=record, send_ids=send_ids), **_batches()
    )


def generate(
    table: pa.Table,
    engines: EnginePool,
    sampling: dict[str, Sampling],
    critic: CriticQueries | None = None,
    record: Record | None = None,
) -> pa.Table:
    """Stage 1: continue every row on the engines, with the critic's values; evaluation rows have a sampling of their own."""
    table = schema.check(table, "plan")
    if not table.num_rows:
        return schema.append(table, {name: [] for name, _ in schema.GENERATE}, "generate")
    rows = table.to_pylist()
    kinds = {"eval" if row["purpose"] == "eval" else "train" for row in rows}
    if len(kinds) > 1:
        raise schema.SchemaError("a block mixes evaluation rows with training rows.")
    with _span(record, "gen", table):
        completions = engines.generate(rows, sampling[kinds.pop()], critic)
    return schema.append(table, {name: [one[name] for one in completions] for name, _ in schema.GENERATE}, "generate")


def judge_rows(table: pa.Table, config: JudgeConfig, record: Record | None = None, send_ids: bool = False) -> pa.Table:
    """Stage 2: one reward per continuation, or null with a status; never a 0 that no verifier gave.

    Ends that are the critic's are not judged. `send_ids`: reward functions of TRL's signature may ask for the token ids.
    """
    table = schema.check(table, "generate")
    columns = ("row_id", "data_source", "ground_truth", "extra_info", "response_text", "from_critic")
    items = [
        {"row_id": row, "data_source": source, "ground_truth": truth, "extra_info": extra, "response": text}
        for row, source, truth, extra, texts, owned in zip(*(table[name].to_pylist() for name in columns), strict=True)
        for text, from_critic in zip(texts, owned, strict=True)
        if not from_critic
    ]
    if send_ids:
        pairs = zip(table["response_ids"].to_pylist(), table["from_critic"].to_pylist(), strict=True)
        every = (ids for responses, owned in pairs for ids, from_critic in zip(responses, owned, strict=True) if not from_critic)
        items = [item | {"response_ids": ids} for item, ids in zip(items, every, strict=True)]
    with _span(record, "reward", table):
        verdicts = iter(_ask_judge(items, config) if items else [])
    groups = [
        [NOT_JUDGED if from_critic else next(verdicts) for from_critic in owned] for owned in table["from_critic"].to_pylist()
    ]
    columns_of = {
        "reward": [[verdict["reward"] for verdict in group] for group in groups],
        "reward_status": [[verdict["status"] for verdict in group] for group in groups],
    }
    return schema.append(table, columns_of, "judge")


def _ask_judge(items: list[dict[str, Any]], config: JudgeConfig) -> list[dict[str, Any]]:
    from serve.judge import handle

    reason = ""
    for attempt in range(config.retries + 1):
        try:
            verdicts = handle().score_batch.remote(items).result(timeout_s=config.request_timeout_s)
            if len(verdicts) == len(items):
                return verdicts
            reason = f"{len(verdicts)} verdicts for {len(items)} responses"
        except TimeoutError:
            reason = f"no answer within {config.request_timeout_s:g} s"
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            time.sleep(min(2.0**attempt, 10.0))
    return [{"reward": None, "status": f"error: judge: {reason}"}] * len(items)


def credit(table: pa.Table, algorithm: Algorithm) -> pa.Table:
    """Stage 3: the algorithm's credit for each group; evaluation and refill rows get none."""
    table = schema.check(table, "judge")
    columns: dict[str, list[Any]] = {name: [] for name, _ in schema.CREDIT}
    for row in table.select(CREDITED).append_column("response_lengths", nested_lengths(table["response_ids"])).to_pylist():
        if row["purpose"] in ("eval", "refill"):
            keep = row["purpose"] == "refill" and algorithm.trains_on_refills
            credit = Credit(np.zeros(row["n"]), np.zeros(row["n"], bool), keep)
        else:
            credit = algorithm.credit(as_group(row))
        nobody = np.zeros(row["n"], bool)
        critic_mask = nobody if credit.critic_mask is None else credit.critic_mask
        values = (
            credit.advantages.tolist(),
            credit.actor_mask.tolist(),
            credit.keep,
            credit.critic_target,
            critic_mask.tolist(),
            credit.return_std,
        )
        for name, value in zip(columns, values, strict=True):
            columns[name].append(value)
    return schema.append(table, columns, "credit")


def as_group(row: dict[str, Any]) -> Group:
    """A judged row as the algorithm sees it."""
    return Group(
        rewards=_floats(row["reward"]),
        truncated=np.array([reason == "length" for reason in row["finish_reason"]]),
        lengths=np.array(row["response_lengths"]),
        values=_floats(row["endpoint_value"]),
        from_critic=np.array(row["from_critic"]),
        prefix_value=row["prefix_value"],
    )


def _floats(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else round(value, 6) for value in values], dtype=float)  # tenths, not float32's


def deliver(table: pa.Table, coordinator: ActorHandle) -> pa.Table:
    """Stage 4: everything to the coordinator, and on to the trainer what it shall train on."""
    table = schema.check(table, "credit")
    if not table.num_rows:
        return table
    ray.get(coordinator.ingest.remote(table), timeout=COORDINATOR_TIMEOUT_S)
    return table.filter(table["keep"])


def _record(coordinator: ActorHandle, *span: Any) -> None:
    coordinator.record_span.remote(*span)


@contextmanager
def _span(record: Record | None, name: str, table: pa.Table) -> Iterator[None]:
    start = time.time()
    yield
    if record is not None and table.num_rows:
        record(name, table["step"][0].as_py(), table["purpose"][0].as_py() == "eval", start, time.time())


def _resources() -> dict[str, Any]:
    # A retried task would roll its rows out again with the same seeds; the coordinator takes each row once.
    return {"num_cpus": STAGE_CPUS}


def _batches() -> dict[str, Any]:
    return {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True, **_resources()}
