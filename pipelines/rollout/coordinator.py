"""All state that is not weights, in one place: what to roll out next, what came back, and what to say about it.

An ordinary class; `pipelines.train` runs it as a Ray actor. Calls arrive one at a time.
"""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from algorithms.base import Algorithm
from algorithms.flops import DecodingCost
from algorithms.self_critic import SelfCriticPrompt
from algorithms.types import Problem, PromptRow, Recalled, StoredTrajectory
from pipelines.engines.config import Sampling
from pipelines.rollout import schema
from pipelines.rollout.cursor import PromptCursor
from pipelines.rollout.metrics import light_rows, nothing_learnt, observed_groups, rollout_metrics, sample_rows
from pipelines.rollout.plan import EVAL_ROWS, plan_table
from pipelines.rollout.record import StepRecord
from pipelines.rollout.run_buffer import BufferPlace, RunBuffer
from pipelines.rollout.scores import EvaluationConfig, check_missing, check_scored, evaluation_metrics, mean_score
from pipelines.store import checkpoint
from pipelines.store.rollouts import write_rollouts
from pipelines.store.run_folder import keep_failure
from pipelines.store.tracker import Tracker, TrackingConfig

MEMORY_STREAM = 1 << 20  # the number of a step's randomness that is the memory's; its rounds have the numbers below


@dataclass(frozen=True)
class CoordinatorConfig:
    """What the coordinator is made of."""

    seed: int
    steps: int
    logprob_diff_alarm: float
    max_missing_reward: float
    reward_range: tuple[float, float] | None
    evaluation: EvaluationConfig
    eval_max_new_tokens: int
    sampling: Sampling
    keep_rollouts: int | None
    keep_steps: tuple[int, ...]
    output_dir: str
    replay_url: str
    replay_start_from: str | None
    tokenizer_hash: str
    self_critic_prompt: SelfCriticPrompt | None  # None unless the algorithm asks the model for values
    context_limit: int  # tokens of a self-critic's prompt with its answer
    tracking: TrackingConfig
    params: dict[str, Any]  # the composed configuration
    tags: dict[str, str]


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
        self._by_id = {problem.problem_id: problem for problem in problems}
        self._stopping = False
        self._starts = 0  # how often the trainer has started
        self._fatal: str | None = None
        self._restore(state)
        self._tracker = Tracker(config.tracking, config.params, config.tags, config.output_dir)

    def _restore(self, state: dict[str, Any] | None) -> None:
        """Begin as a checkpoint's state says, or as a new run does."""
        state = state or {"step": 0, "cursor": None, "evaluations": {}, "replay": None, "totals": {}}
        config = self._config
        self.step = state["step"]
        self._cursor = PromptCursor(self._problems, config.seed, state["cursor"])
        self._totals = {"decode/flops_total": 0.0, "decode/tokens_total": 0.0} | state["totals"]
        self._evaluations: dict[int, float] = {int(step): score for step, score in state["evaluations"].items()}
        self.round, self._planned = 0, 0
        self.rng = np.random.default_rng()
        self._rows: pa.Table = schema.STAGES["plan"].empty_table()
        self._training: dict[int, StepRecord] = {}
        self._evaluation: dict[int, StepRecord] = {}
        self._last: dict[str, float] = {}
        self._replay: RunBuffer | None = None
        if (replay := self._algorithm.replay) is not None:
            place = BufferPlace(config.replay_url, config.replay_start_from, config.tokenizer_hash, config.output_dir)
            self._replay = RunBuffer(replay, place, state["replay"], state.get("replay_url"))
        self.memory = self._algorithm.new_memory(config.self_critic_prompt, config.context_limit)
        if self.memory is not None and (found := state.get("memory")) is not None:
            self.memory.restore(found["values"], found["arrays"])

    def rewind(self, path: str | None) -> None:
        """Go back to a checkpoint, or to the beginning, where the trainer starts; its first start finds everything there."""
        self._starts += 1
        if self._starts > 1:
            self._restore(checkpoint.read_coordinator_whole(path) if path is not None else None)

    def fail(self, reason: str, trace: str) -> None:
        """Take the first error that starting again would not mend; the run's folder keeps where it was raised."""
        if self._fatal is None:
            self._fatal = f"{reason}\n(traceback in {keep_failure(self._config.output_dir, trace)})"

    def fatal_error(self) -> str | None:
        """The reason why the run cannot go on, if there is one."""
        return self._fatal

    def stop(self) -> None:
        """Have the trainer end after the step in hand."""
        self._stopping = True

    def stopping(self) -> bool:
        """Whether the trainer shall end."""
        return self._stopping

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self, step: int, round_number: int, policy_version: int) -> int:
        """Plan a round of a step, once however often it is asked for; returns its number of groups (0: the step is complete)."""
        if (step, round_number) == (self.step, self.round):
            return self._planned
        self.step, self.round = step, round_number
        self.rng = np.random.default_rng([self._config.seed, step, round_number])
        record = self._training.setdefault(step, StepRecord())
        rows = self._algorithm.plan(self)
        record.epochs = self._cursor.epochs
        self._planned = len(rows)
        self._rows = plan_table(rows, step, len(record.row_ids), policy_version, self._config.seed)
        return self._planned

    def plan_evaluation(self, step: int, policy_version: int) -> int:
        """Plan one pass over the validation problems; returns their number."""
        evaluation = self._config.evaluation
        rows = [PromptRow(p, evaluation.n, self._config.eval_max_new_tokens, purpose="eval") for p in self._validation]
        self.step, self.round = step, -1
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
        """The next problems of the shuffled dataset."""
        return self._cursor.take(count)

    def problem(self, problem_id: str) -> Problem:
        """A problem of the dataset by its id."""
        return self._by_id[problem_id]

    def trajectories(self) -> list[StoredTrajectory]:
        """What the replay buffer holds of problems that are in this run's dataset, oldest first."""
        return self._replay.trajectories(self._by_id) if self._replay is not None else []

    def prefix(self, trajectory: StoredTrajectory, cut: int) -> list[int]:
        """The first `cut` response tokens of a stored trajectory."""
        assert self._replay is not None
        return self._replay.buffer.prefix(trajectory, cut)

    # -- what an algorithm remembers -------------------------------------------------------------------------------------

    def recall(self, step: int, rank: int, ranks: int) -> Recalled:
        """A rank's share of what the algorithm's memory has for the update of a step whose groups are all in."""
        record, rng = self._training[step], np.random.default_rng([self._config.seed, step, MEMORY_STREAM])
        if record.recalled is None:
            assert self.memory is not None
            groups = observed_groups(record.table(), self._algorithm.credit_type)
            record.observed = self._algorithm.observe(self.memory, groups, rng)
            record.recalled = self.memory.recall(rng)
        longest_first = sorted(record.recalled.lessons, key=lambda lesson: -len(lesson.context))  # shares of equal length
        return replace(record.recalled, lessons=longest_first[rank::ranks])

    def remember(self, values: dict[str, float]) -> None:
        """Take what an update left for the next."""
        assert self.memory is not None
        self.memory.remember(values)

    # -- what comes back ---------------------------------------------------------------------------------------------

    def ingest(self, table: pa.Table) -> None:
        """Take a block's finished groups; one that a retried task brings again is taken once, one of a step that is over never."""
        step, purpose = table["step"][0].as_py(), table["purpose"][0].as_py()  # a block is of one plan
        record = (self._evaluation if purpose == "eval" else self._training).get(step)
        if record is not None:
            record.take(table)

    def record_span(self, name: str, step: int, evaluation: bool, start: float, end: float) -> None:
        """Note when a block was in a stage, by the stage's metric."""
        record = (self._evaluation if evaluation else self._training).get(step)
        if record is not None:
            record.span(name, start, end)

    def record_counts(self, step: int, evaluation: bool, counts: dict[str, float]) -> None:
        """Add what a stage has counted of a block, by metric."""
        record = (self._evaluation if evaluation else self._training).get(step)
        if record is not None:
            record.counts.update(counts)

    def finish_step(self, step: int, trainer_metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of a completed step, logged and returned; RuntimeError if too many rewards are missing."""
        record = self._training.pop(step)
        table = record.table()
        rows = light_rows(table)
        if self._replay is not None:
            self._replay.fill(table, asdict(self._config.sampling))
        metrics = rollout_metrics(rows, self._cost, self._config.reward_range) | (record.observed or {}) | trainer_metrics
        metrics |= {name: end - start for name, (start, end) in record.spans.items()} | dict(record.counts)
        self._totals["decode/flops_total"] += metrics["decode/flops"]
        self._totals["decode/tokens_total"] += metrics["decode/tokens"]
        difference = metrics.get("training/rollout_logprob_diff_mean", 0.0)
        metrics |= self._totals | {
            "training/global_step": float(step),
            "training/epoch": record.epochs,
            "training/problems": float(self._cursor.drawn),
            "training/rollout_alarm": float(not difference <= self._config.logprob_diff_alarm),  # NaN too
            "training/restarts": float(max(self._starts - 1, 0)),
            "training/filter_groups/dropped": metrics["training/groups"] - record.kept,
        }
        metrics |= self._replay.metrics(step, self._by_id) if self._replay is not None else {}
        if "timing_s/step" in metrics:
            metrics["perf/time_per_step"] = metrics["timing_s/step"]
            metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
        self._tracker.metrics(metrics, step)
        self._last = metrics
        write_rollouts(self._config.output_dir, step, table, self._config.keep_rollouts, self._config.keep_steps)
        check_missing(step, rows, metrics["reward/missing_fraction"], self._config.max_missing_reward)
        return metrics

    def finish_evaluation(self, step: int) -> dict[str, float]:
        """Metrics of the evaluation pass, logged and returned, with sample rollouts kept as a table."""
        record = self._evaluation.pop(step)
        table = record.table()
        rows = light_rows(table)
        check_scored(rows)
        n = self._config.evaluation.n
        metrics = evaluation_metrics(rows, n, seed=self._config.seed) | self._totals
        metrics |= {"val-aux/" + name: count for name, count in record.counts.items()}
        metrics["timing_s/testing"] = record.spans["timing_s/reward"][1] - record.spans["timing_s/gen"][0]
        self._tracker.metrics(metrics, step)
        self._evaluations[step] = mean_score(metrics, n)
        if samples := sample_rows(table.slice(0, self._config.tracking.sample_rollouts)):
            self._tracker.samples(samples, step)
        return metrics

    # -- reports and state -------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """What a progress line shows."""
        return {
            "step": int(self._last.get("training/global_step", 0)),
            "steps": self._config.steps,
            "score": self._last.get("critic/score/mean"),
            "tokens_per_s": self._last.get("perf/throughput"),
            "step_s": self._last.get("timing_s/step"),
            "decode_flops": self._totals["decode/flops_total"],
            "evaluations": dict(self._evaluations),
            "warnings": self._warnings(),
            "alarm": self._last.get("training/rollout_alarm", 0.0) > 0,
            "restarts": max(self._starts - 1, 0),
            "mlflow_run_id": self._tracker.run_id,
            "time": time.time(),
        }

    def _warnings(self) -> list[str]:
        found = [] if self._replay is None else [f"replay buffer file skipped: {why}" for why in self._replay.buffer.skipped]
        found += nothing_learnt(self._last)
        return found + (self.memory.warnings() if self.memory is not None else [])

    def checkpointed(self, step: int, path: str, seconds: float) -> None:
        """Name the newest checkpoint in the run's tags, and log what it took."""
        self._tracker.metrics({"timing_s/save_checkpoint": seconds}, step)
        self._tracker.tag("checkpoint", path)
        self._tracker.tag("checkpoint_step", str(step))

    def close(self, status: str) -> str | None:
        """End the MLflow run; a sentence if not everything could be sent."""
        return self._tracker.finish(status)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on: JSON-ready values, and the arrays of the memory; taken between steps."""
        memory = None
        if self.memory is not None:
            values, arrays = self.memory.state()
            memory = {"values": values, "arrays": arrays}
        return {
            "step": self.step,
            "cursor": self._cursor.state(),
            "totals": self._totals,
            "evaluations": {str(step): score for step, score in self._evaluations.items()},
            "replay": self._replay.buffer.state() if self._replay is not None else None,
            "replay_url": self._config.replay_url,
            "memory": memory,
            "mlflow_run_id": self._tracker.run_id,
        }
