"""All state that is not weights, in one place: what to roll out next, what came back, and what to say about it.

An ordinary class; `pipelines.train` runs it as a Ray actor. Calls arrive one at a time.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from algorithms.contract import Algorithm
from algorithms.critic import CriticPrompt
from algorithms.flops import DecodingCost
from algorithms.types import Problem, PromptRow, Recalled, StoredTrajectory
from pipelines.engines.engine import Sampling
from pipelines.rollout import schema
from pipelines.rollout.metrics import light_rows, observed_groups, rollout_metrics
from pipelines.rollout.plan import EVAL_ROWS, plan_table
from pipelines.rollout.scores import EvaluationConfig, evaluation_metrics, mean_score
from pipelines.store import checkpoint
from pipelines.store.replay_buffer import ReplayBuffer, holds, trajectories
from pipelines.store.tracker import Tracker, TrackingConfig

MEMORY_STREAM = 1 << 20  # of a step's randomness; its rounds have the numbers below


@dataclass(frozen=True)
class CoordinatorConfig:
    """What the coordinator is made of."""

    seed: int
    steps: int
    logprob_diff_alarm: float  # mean difference between engine and trainer above which a step is said to be off
    max_missing_reward: float  # fraction of a step's responses without a reward above which the run stops
    evaluation: EvaluationConfig
    eval_max_new_tokens: int
    sampling: Sampling
    keep_rollouts: int | None  # newest steps whose groups stay on disk; None keeps all
    output_dir: str
    replay_url: str
    replay_start_from: str | None
    tokenizer_hash: str
    critic_prompt: CriticPrompt | None  # of algorithms whose critic is the model itself
    context_limit: int  # of a critic's prompt with its answer
    tracking: TrackingConfig
    params: dict[str, Any]  # the composed configuration
    tags: dict[str, str]


@dataclass
class StepRecord:
    """What came back of one step, or of its evaluation: kept apart by step, as ranks may already be planning the next."""

    tables: list[pa.Table] = field(default_factory=list)
    row_ids: set[int] = field(default_factory=set)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)  # by stage: first start, last end
    kept: int = 0
    in_order: bool = False  # whether `tables` is the one sorted table
    observed: dict[str, float] | None = None  # what the algorithm said of the groups, once it has seen them
    recalled: Recalled | None = None
    epoch: float = 0.0  # after its last draw of problems

    def take(self, table: pa.Table) -> None:
        """Add a block's groups, each once."""
        new = [i for i, row_id in enumerate(table["row_id"].to_pylist()) if row_id not in self.row_ids]
        table = table.take(pa.array(new, pa.int64()))
        self.tables.append(table)
        self.in_order = False
        self.row_ids.update(table["row_id"].to_pylist())
        self.kept += sum(table["keep"].to_pylist())

    def table(self) -> pa.Table:
        """All groups in their order; sorted once, as an algorithm's memory and the step's end both ask for it."""
        if len(self.tables) > 1 or not self.in_order:
            self.tables, self.in_order = [pa.concat_tables(self.tables).sort_by("row_id").combine_chunks()], True
        return self.tables[0]


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
        self._starts = 0  # of the trainer
        self._fatal: str | None = None
        self._restore(state)
        self._tracker = Tracker(config.tracking, config.params, config.tags, config.output_dir)

    def _restore(self, state: dict[str, Any] | None) -> None:
        """Begin as a checkpoint's state says, or as a new run does."""
        state = state or {"step": 0, "epoch": 0, "cursor": 0, "evaluations": {}, "replay": None, "totals": {}}
        self.step, self._epoch, self._cursor = state["step"], state["epoch"], state["cursor"]
        self._totals = {"decode/flops": 0.0, "decode/tokens": 0.0, "training/problems": 0.0} | state["totals"]
        self._evaluations: dict[int, float] = {int(step): score for step, score in state["evaluations"].items()}
        self._order = self._permutation()
        self.round, self._planned = 0, 0
        self.rng = np.random.default_rng()
        self._rows: pa.Table = schema.STAGES["plan"].empty_table()
        self._training: dict[int, StepRecord] = {}
        self._evaluation: dict[int, StepRecord] = {}
        self._last: dict[str, float] = {}
        self._replay = self._open_replay(state["replay"], state.get("replay_url"))
        self.memory = self._algorithm.new_memory(self._config.critic_prompt, self._config.context_limit)
        if self.memory is not None and (found := state.get("memory")) is not None:
            self.memory.restore(found["values"], found["arrays"])

    def _open_replay(self, view: dict[str, Any] | None, url: str | None) -> ReplayBuffer | None:
        replay, config = self._algorithm.replay, self._config
        if replay is None:
            return None
        if view is None and config.replay_start_from is not None:
            return ReplayBuffer.copy_of(config.replay_start_from, config.replay_url, replay.capacity, config.tokenizer_hash)
        if view is not None and url is not None and not holds(config.replay_url, view):  # a branch of another run
            return ReplayBuffer.copy_of(url, config.replay_url, replay.capacity, config.tokenizer_hash, view)
        return ReplayBuffer(config.replay_url, replay.capacity, config.tokenizer_hash, view)

    def rewind(self, path: str | None) -> None:
        """Go back to a checkpoint, or to the beginning, where the trainer starts; its first start finds everything there."""
        self._starts += 1
        if self._starts > 1:
            self._restore(checkpoint.read_coordinator_whole(path) if path is not None else None)

    def fail(self, reason: str) -> None:
        """Take the first error that starting again would not mend."""
        self._fatal = self._fatal or reason

    def fatal_error(self) -> str | None:
        """The reason why the run cannot go on, if there is one."""
        return self._fatal

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self, step: int, round_number: int, policy_version: int) -> int:
        """Plan a round of a step, once however often it is asked for; returns its number of groups (0: the step is complete)."""
        if (step, round_number) == (self.step, self.round):
            return self._planned
        self.step, self.round = step, round_number
        self.rng = np.random.default_rng([self._config.seed, step, round_number])
        record = self._training.setdefault(step, StepRecord())
        rows = self._algorithm.plan(self) if round_number < self._algorithm.max_rounds else []
        record.epoch = self._epoch + self._cursor / len(self._problems)
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

    def problem(self, problem_id: str) -> Problem:
        """A problem of the dataset by its id."""
        return self._by_id[problem_id]

    def trajectories(self) -> list[StoredTrajectory]:
        """What the replay buffer holds of problems that are in this run's dataset, oldest first."""
        return [t for t in self._replay.trajectories() if t.problem_id in self._by_id] if self._replay is not None else []

    def prefix(self, trajectory: StoredTrajectory, cut: int) -> list[int]:
        """The first `cut` response tokens of a stored trajectory."""
        assert self._replay is not None
        return self._replay.prefix(trajectory, cut)

    # -- what an algorithm remembers -------------------------------------------------------------------------------------

    def recall(self, step: int, rank: int, ranks: int) -> Recalled:
        """A rank's share of what the algorithm's memory has for the update of a step whose groups are all in."""
        record, rng = self._training[step], np.random.default_rng([self._config.seed, step, MEMORY_STREAM])
        if record.recalled is None:
            assert self.memory is not None
            record.observed = self._algorithm.observe(self.memory, observed_groups(record.table()), rng)
            record.recalled = self.memory.recall(rng)
        longest_first = sorted(record.recalled.examples, key=lambda example: -len(example.context))  # shares of equal length
        return replace(record.recalled, examples=longest_first[rank::ranks])

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
        """Note when a block was in a stage; a stage's time is from its first block's start to its last block's end."""
        record = (self._evaluation if evaluation else self._training).get(step)
        if record is not None:
            first, last = record.spans.get(name, (start, end))
            record.spans[name] = min(first, start), max(last, end)

    def finish_step(self, step: int, trainer_metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of a completed step, logged and returned; RuntimeError if too many rewards are missing."""
        record = self._training.pop(step)
        table = record.table()
        rows = light_rows(table)
        self._store(table)
        metrics = rollout_metrics(rows, self._cost) | (record.observed or {}) | trainer_metrics
        metrics |= {f"timing_s/{name}": end - start for name, (start, end) in record.spans.items()}
        for name in ("decode/flops", "decode/tokens"):
            self._totals[name] += metrics[name]
            metrics[f"{name}_total"] = self._totals[name]
        metrics["training/global_step"] = float(step)
        metrics["training/epoch"] = record.epoch
        difference = metrics.get("training/rollout_logprob_diff_mean", 0.0)
        metrics["training/rollout_alarm"] = float(difference > self._config.logprob_diff_alarm)
        metrics["training/restarts"] = float(max(self._starts - 1, 0))
        metrics["training/filter_groups/dropped"] = metrics["training/groups"] - record.kept
        metrics |= self._replay_metrics(step)
        if "timing_s/step" in metrics:
            metrics["perf/time_per_step"] = metrics["timing_s/step"]
            metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
        self._tracker.metrics(metrics, step)
        self._last = metrics
        self._write_rollouts(step, table)
        self._check_missing(step, rows, metrics["reward/missing_fraction"])
        return metrics

    def finish_evaluation(self, step: int) -> dict[str, float]:
        """Metrics of the evaluation pass, logged and returned, with sample rollouts kept as a table."""
        record = self._evaluation.pop(step)
        table = record.table()
        rows = light_rows(table)
        n = self._config.evaluation.n
        metrics = evaluation_metrics(rows, n, seed=self._config.seed)
        metrics["timing_s/testing"] = record.spans["reward"][1] - record.spans["gen"][0]
        metrics |= {f"{name}_total": value for name, value in self._totals.items() if name.startswith("decode/")}
        self._tracker.metrics(metrics, step)
        self._evaluations[step] = mean_score(metrics, n)
        samples = [
            {"problem_id": row["problem_id"], "response": text, "reward": reward, "status": status}
            for row in table.slice(0, self._config.tracking.sample_rollouts).to_pylist()
            for text, reward, status in zip(row["response_text"][:1], row["reward"][:1], row["reward_status"][:1], strict=True)
        ]
        if samples:
            self._tracker.samples(samples, step)
        return metrics

    def _store(self, table: pa.Table) -> None:
        """A step's refill rollouts, right or wrong, enter the replay buffer."""
        if self._replay is not None:
            assert self._algorithm.replay is not None
            refills = table.filter(pc.equal(table["purpose"], "refill"))
            if (least := self._algorithm.replay.least_reward) is not None:
                first = pc.list_element(refills["reward"], 0) if refills.num_rows else refills["reward"]
                refills = refills.filter(pc.fill_null(pc.greater_equal(first, least), False)) if refills.num_rows else refills
            self._replay.append(trajectories(refills, asdict(self._config.sampling)))
            self._replay.collect(self._pinned_files())

    def _pinned_files(self) -> set[str]:
        """Buffer files that a checkpoint may go back to."""
        states = [checkpoint.read_coordinator(path) for path in checkpoint.complete(self._config.output_dir)]
        return {name for state in states for name in (state["replay"] or {"files": []})["files"]}

    def _replay_metrics(self, step: int) -> dict[str, float]:
        if self._replay is None:
            return {}
        stored = self._replay.trajectories()
        metrics = {"replay/size": float(len(stored)), "replay/skipped_files": float(len(self._replay.skipped))}
        if stored:
            metrics["replay/age_steps/mean"] = float(np.mean([step - t.step for t in stored]))
            metrics["replay/problems"] = float(len({t.problem_id for t in stored}))
            metrics["replay/unknown_problems"] = float(sum(t.problem_id not in self._by_id for t in stored))
        return metrics

    def _write_rollouts(self, step: int, table: pa.Table) -> None:
        """Keep the step's groups as Parquet in the project's schema."""
        folder = Path(self._config.output_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / f"step_{step:06d}.parquet")
        if (kept := self._config.keep_rollouts) is not None:
            for file in folder.glob("step_*.parquet"):
                if int(file.stem.removeprefix("step_")) <= step - kept:
                    file.unlink()

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
            "warnings": self._warnings(),
            "alarm": self._last.get("training/rollout_alarm", 0.0) > 0,
            "restarts": max(self._starts - 1, 0),
            "mlflow_run_id": self._tracker.run_id,
            "time": time.time(),
        }

    def _warnings(self) -> list[str]:
        found = [] if self._replay is None else [f"replay buffer file skipped: {why}" for why in self._replay.skipped]
        if self._last.get("actor/empty_minibatches"):
            found.append(
                f"step {self._last['training/global_step']:.0f}: an actor minibatch had no response to learn from (all truncated "
                "and filtered, or without a reward), so its step was skipped"
            )
        return found + (self.memory.warnings() if self.memory is not None else [])

    def checkpointed(self, step: int, path: str) -> None:
        """Name the newest checkpoint in the run's tags."""
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
            "epoch": self._epoch,
            "cursor": self._cursor,
            "totals": self._totals,
            "evaluations": {str(step): score for step, score in self._evaluations.items()},
            "replay": self._replay.state() if self._replay is not None else None,
            "replay_url": self._config.replay_url,
            "memory": memory,
            "mlflow_run_id": self._tracker.run_id,
        }

    def _permutation(self) -> np.ndarray:
        return np.random.default_rng([self._config.seed, self._epoch]).permutation(len(self._problems))
