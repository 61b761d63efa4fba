"""All state that is not weights, in one place: what to roll out next, what came back, and what to say about it.

An ordinary class; `pipelines.train` runs it as a Ray actor. Calls arrive one at a time.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from algorithms.flops import DecodingCost
from algorithms.types import Algorithm, Problem, PromptRow
from pipelines import schema
from pipelines.evaluation import EvaluationConfig, evaluation_metrics, mean_score
from pipelines.metrics import rollout_metrics
from pipelines.planning import EVAL_ROWS, plan_table
from pipelines.tracking import Tracker, TrackingConfig


@dataclass(frozen=True)
class CoordinatorConfig:
    """What the coordinator is made of."""

    seed: int
    steps: int
    max_missing_reward: float  # fraction of a step's responses without a reward above which the run stops
    evaluation: EvaluationConfig
    eval_max_new_tokens: int
    output_dir: str
    tracking: TrackingConfig
    params: dict[str, Any]  # the composed configuration
    tags: dict[str, str]


@dataclass
class StepRecord:
    """What came back of one step, or of its evaluation: kept apart by step, as ranks may already be planning the next."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # by row id
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)  # by stage: first start, last end
    kept: int = 0
    epoch: float = 0.0  # after its last draw of problems


class Coordinator:
    """Owns the prompt cursor, the step in progress, running totals, and the MLflow run. Implements `PlanState`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        algorithm: Algorithm,
        problems: list[Problem],
        validation: list[Problem],
        cost: DecodingCost,
        state: dict[str, Any] | None,
    ) -> None:
        self._config, self._algorithm, self._cost = config, algorithm, cost
        self._problems, self._validation = problems, validation
        self.step = 0
        self._round, self._planned = 0, 0
        self._epoch, self._cursor = 0, 0
        self._totals = {"decode/flops": 0.0, "decode/tokens": 0.0, "training/problems": 0.0}
        self._evaluations: dict[int, float] = {}
        run_id = None
        if state is not None:
            self._restore(state)
            run_id = state["mlflow_run_id"]
        self._rows: pa.Table = schema.STAGES["plan"].empty_table()
        self._training: dict[int, StepRecord] = {}
        self._evaluation: dict[int, StepRecord] = {}
        self._last: dict[str, float] = {}
        self._order = self._permutation()
        self._tracker = Tracker(config.tracking, run_id, config.params, config.tags)

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self, step: int, round_number: int, policy_version: int) -> int:
        """Plan a round of a step, once however often it is asked for; returns its number of groups (0: the step is complete)."""
        if (step, round_number) == (self.step, self._round):
            return self._planned
        self.step, self._round = step, round_number
        record = self._training.setdefault(step, StepRecord())
        rows = self._algorithm.plan(self) if round_number < self._algorithm.max_rounds else []
        record.epoch = self._epoch + self._cursor / len(self._problems)
        self._planned = len(rows)
        self._rows = plan_table(rows, step, len(record.rows), policy_version, self._config.seed)
        return self._planned

    def plan_evaluation(self, step: int, policy_version: int) -> int:
        """Plan one pass over the validation problems; returns their number."""
        evaluation = self._config.evaluation
        rows = [PromptRow(p, evaluation.n, self._config.eval_max_new_tokens, purpose="eval") for p in self._validation]
        self.step, self._round = step, -1
        self._evaluation[step] = StepRecord()
        self._rows = plan_table(rows, step, EVAL_ROWS, policy_version, self._config.seed)
        return len(rows)

    def rows(self, block: int, blocks: int) -> pa.Table:
        """One block's share of the rows planned last."""
        return self._rows.take(np.arange(block, self._rows.num_rows, blocks))

    @property
    def kept_groups(self) -> int:
        """Groups of this step that are generated and kept so far."""
        return self._training[self.step].kept

    def fresh_problems(self, count: int) -> list[Problem]:
        """The next problems of the shuffled dataset; a new epoch is shuffled anew, by seed and epoch."""
        taken = []
        for _ in range(count):
            if self._cursor == len(self._order):
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = self._permutation()
            taken.append(self._problems[self._order[self._cursor]])
            self._cursor += 1
        self._totals["training/problems"] += count
        return taken

    # -- what comes back ---------------------------------------------------------------------------------------------

    def ingest(self, table: pa.Table) -> None:
        """Take a block's finished groups; a row that a retried task brings again is taken once."""
        for row in table.to_pylist():
            record = self._record(row["step"], row["purpose"] == "eval")
            if row["row_id"] not in record.rows:
                record.rows[row["row_id"]] = row
                record.kept += row["keep"]

    def record_span(self, name: str, step: int, evaluation: bool, start: float, end: float) -> None:
        """Note when a block was in a stage; a stage's time is from its first block's start to its last block's end."""
        spans = self._record(step, evaluation).spans
        first, last = spans.get(name, (start, end))
        spans[name] = min(first, start), max(last, end)

    def _record(self, step: int, evaluation: bool) -> StepRecord:
        return (self._evaluation if evaluation else self._training)[step]

    def finish_step(self, step: int, trainer_metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of a completed step, logged and returned; RuntimeError if too many rewards are missing."""
        record = self._training.pop(step)
        rows = list(record.rows.values())
        metrics = rollout_metrics(rows, self._cost) | trainer_metrics
        metrics |= {f"timing_s/{name}": end - start for name, (start, end) in record.spans.items()}
        for name in ("decode/flops", "decode/tokens"):
            self._totals[name] += metrics[name]
            metrics[f"{name}_total"] = self._totals[name]
        metrics["training/global_step"] = float(step)
        metrics["training/epoch"] = record.epoch
        metrics["training/filter_groups/dropped"] = float(len(rows) - record.kept)
        tokens = sum(row["n"] * (len(row["prompt_ids"]) + len(row["prefix_ids"])) for row in rows) + metrics["decode/tokens"]
        metrics["perf/total_num_tokens"] = float(tokens)
        if "timing_s/step" in metrics:
            metrics["perf/time_per_step"] = metrics["timing_s/step"]
            metrics["perf/throughput"] = tokens / metrics["timing_s/step"]
        self._tracker.metrics(metrics, step)
        self._last = metrics
        self._write_rollouts(step, rows)
        self._check_missing(step, rows, metrics["reward/missing_fraction"])
        return metrics

    def finish_evaluation(self, step: int) -> dict[str, float]:
        """Metrics of the evaluation pass, logged and returned, with sample rollouts kept as a table."""
        record = self._evaluation.pop(step)
        rows = [record.rows[row_id] for row_id in sorted(record.rows)]
        n = self._config.evaluation.n
        metrics = evaluation_metrics(rows, n, seed=self._config.seed)
        metrics["timing_s/testing"] = record.spans["reward"][1] - record.spans["gen"][0]
        metrics |= {f"{name}_total": value for name, value in self._totals.items() if name.startswith("decode/")}
        self._tracker.metrics(metrics, step)
        self._evaluations[step] = mean_score(metrics, n)
        samples = [
            {"problem_id": row["problem_id"], "response": text, "reward": reward, "status": status}
            for row in rows
            for text, reward, status in zip(row["response_text"][:1], row["reward"][:1], row["reward_status"][:1], strict=True)
        ]
        if kept := samples[: self._config.tracking.sample_rollouts]:
            self._tracker.samples(kept, step)
        return metrics

    def _write_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Keep the step's groups as Parquet in the project's schema."""
        folder = Path(self._config.output_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(sorted(rows, key=lambda row: row["row_id"]), schema=schema.STAGES["credit"])
        pq.write_table(table, folder / f"step_{step:06d}.parquet")

    def _check_missing(self, step: int, rows: list[dict[str, Any]], fraction: float) -> None:
        if fraction <= self._config.max_missing_reward:
            return
        reason = next(s for row in rows for s, r in zip(row["reward_status"], row["reward"], strict=True) if r is None)
        raise RuntimeError(
            f"step {step}: {fraction:.0%} of the responses got no reward, more than max_missing_reward="
            f"{self._config.max_missing_reward:.0%}; the first says: {reason}"
        )

    # -- reports and state -------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """What a progress line shows."""
        return {
            "step": int(self._last.get("training/global_step", 0)),
            "steps": self._config.steps,
            "score": self._last.get("critic/score/mean"),
            "tokens_per_s": self._last.get("perf/throughput"),
            "step_s": self._last.get("timing_s/step"),
            "decode_flops": self._totals["decode/flops"],
            "evaluations": dict(self._evaluations),
            "mlflow_run_id": self._tracker.run_id,
            "time": time.time(),
        }

    def checkpointed(self, step: int, path: str) -> None:
        """Name the newest checkpoint in the run's tags."""
        self._tracker.tag("checkpoint", path)
        self._tracker.tag("checkpoint_step", str(step))

    def close(self, status: str) -> None:
        """End the MLflow run."""
        self._tracker.finish(status)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on, as JSON-ready values; taken between steps."""
        return {
            "step": self.step,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "totals": self._totals,
            "evaluations": {str(step): score for step, score in self._evaluations.items()},
            "mlflow_run_id": self._tracker.run_id,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self._epoch, self._cursor = state["step"], state["epoch"], state["cursor"]
        self._totals = dict(state["totals"])
        self._evaluations = {int(step): score for step, score in state["evaluations"].items()}

    def _permutation(self) -> np.ndarray:
        return np.random.default_rng([self._config.seed, self._epoch]).permutation(len(self._problems))
