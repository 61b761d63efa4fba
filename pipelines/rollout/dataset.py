"""The rollout dataset: source -> generate -> judge -> credit -> deliver, executed anew for each round of each step.

Engines and judge outlive the passes; the stages are light tasks that call them. Ray Data fuses the stages of a block, so a block's
groups are judged and handed over while other blocks still generate.
"""

from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data import Dataset
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from algorithms.base import Algorithm
from pipelines.engines.config import Sampling
from pipelines.engines.pool import EnginePool
from pipelines.engines.self_critic import SelfCritic
from pipelines.rollout import schema
from pipelines.rollout.stages import Record, Stage, credit, deliver, generate, judge_rows
from pipelines.trainer.link import CoordinatorLink
from serve.judge import JudgeConfig

STAGE_CPUS = 0.05  # stages wait more than they work

# A retried task would roll its rows out again with the same seeds; the coordinator takes each row once.
RESOURCES: dict[str, Any] = {"num_cpus": STAGE_CPUS}
WHOLE_BLOCKS: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True, **RESOURCES}


class PlannedRows(Datasource):
    """Read tasks that ask the coordinator for their share of the rows planned last."""

    def __init__(self, coordinator: CoordinatorLink, blocks: int) -> None:
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


def _read_block(coordinator: CoordinatorLink, block: int, blocks: int) -> list[pa.Table]:
    return [coordinator.ask("rows", block, blocks)]


def rollout_dataset(
    coordinator: CoordinatorLink,
    engines: EnginePool,
    judge: JudgeConfig,
    algorithm: Algorithm,
    sampling: dict[str, Sampling],
    blocks: int,
    self_critic: SelfCritic | None = None,
    send_ids: bool = False,
) -> Dataset:
    """The dataset that a trainer iterates: each pass rolls out what the coordinator planned last."""
    rows = ray.data.read_datasource(PlannedRows(coordinator, blocks), override_num_blocks=blocks, **RESOURCES)
    delivery = partial(deliver, coordinator=coordinator, credit_type=algorithm.credit_type)
    return (
        judged_dataset(rows, engines, judge, sampling, self_critic, coordinator.tell, send_ids)
        .map_batches(Stage("credit", partial(credit, algorithm=algorithm)).__call__, **WHOLE_BLOCKS)
        .map_batches(Stage("deliver", delivery).__call__, **WHOLE_BLOCKS)
    )


def judged_dataset(
    rows: Dataset,
    engines: EnginePool,
    judge: JudgeConfig,
    sampling: dict[str, Sampling],
    self_critic: SelfCritic | None = None,
    record: Record | None = None,
    send_ids: bool = False,
) -> Dataset:
    """Planned rows, generated and judged."""
    generation = partial(generate, engines=engines, sampling=sampling, self_critic=self_critic, record=record)
    judging = partial(judge_rows, config=judge, record=record, send_ids=send_ids)
    stages = (Stage("generate", generation), Stage("judge", judging))
    return rows.map_batches(stages[0].__call__, **WHOLE_BLOCKS).map_batches(stages[1].__call__, **WHOLE_BLOCKS)
