"""`python -m pipelines.evaluate checkpoint=... [task=...] [evaluation.n=16] [key=value ...]`: mean@n and best@k of a checkpoint."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from algorithms.types import Problem, PromptRow
from pipelines.command import cluster
from pipelines.command.entry import command
from pipelines.command.progress import table
from pipelines.command.scorable import scoring_of
from pipelines.config.run import RunConfig, build
from pipelines.data.problems import load_problems, reading_notes
from pipelines.data.prompts import load_tokenizer
from pipelines.engines.config import Sampling
from pipelines.engines.pool import EnginePool
from pipelines.rollout import schema
from pipelines.rollout.dataset import judged_dataset
from pipelines.rollout.plan import EVAL_ROWS, plan_table
from pipelines.rollout.scores import check_scored, evaluation_metrics
from pipelines.store import checkpoint
from serve import judge, typed_json
from serve.reward_function import RewardFunction


def run(tree: dict[str, Any]) -> dict[str, float]:
    """Evaluate; prints the metrics, writes one row per problem, returns the metrics."""
    output = Path(tree.pop("output")).resolve()
    # Here `checkpoint` is what to evaluate, and none are written.
    model = tree["model"] | {"path": checkpoint.model_folder(tree["checkpoint"])}
    config = build(tree | {"model": model, "checkpoint": {"every": 0, "keep_last": 1, "keep_best": 0}})
    tokenizer = load_tokenizer(config.model.path)
    reward = RewardFunction.read(config.reward)
    problems = load_problems(config.task.validation, tokenizer, *config.task.reading(keep_prompts=reward is not None))
    scoring = scoring_of(config, reward, [], problems.problems)
    if notes := reading_notes(tokenizer, problems):
        print(table(notes))
    cluster.connect(config.ray, config.judge.http_port)
    parts = cluster.demand(config)
    cluster.check_demand({name: part for name, part in parts.items() if "trainer" not in name})
    engines = EnginePool.start(config.model.path, config.model.dtype, config.max_model_len, config.engines, config.seed)
    judge.start(config.judge, scoring, output.parent)
    engines.wait_ready()
    rows = evaluate(config, problems.problems, engines)
    output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(per_problem(rows), output)
    check_scored(rows)
    metrics = evaluation_metrics(rows, config.evaluation.n, seed=config.seed)
    print(table([*((name, f"{value:.4f}") for name, value in metrics.items()), ("problems", str(len(rows)))]))
    print(table([("dropped as overlong", str(problems.dropped_overlong)), ("per-problem table", str(output))]))
    return metrics


def evaluate(config: RunConfig, problems: list[Problem], engines: EnginePool) -> list[dict[str, Any]]:
    """Judged rows of `evaluation.n` responses to every problem."""
    evaluation = config.evaluation
    planned = [PromptRow(p, evaluation.n, config.task.max_new_tokens, purpose="eval") for p in problems]
    rows = plan_table(planned, 0, EVAL_ROWS, 0, config.seed)
    blocks = [rows.take(list(range(i, rows.num_rows, config.blocks))) for i in range(min(config.blocks, rows.num_rows))]
    sampling = {"eval": Sampling(evaluation.temperature, evaluation.top_p, evaluation.top_k)}
    dataset = judged_dataset(
        ray.data.from_arrow(blocks), engines, config.judge, sampling, send_ids=config.reward.signature == "trl"
    )
    judged = pa.concat_tables(batch for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
    return schema.check(judged, "judge").sort_by("row_id").to_pylist()


def per_problem(rows: list[dict[str, Any]]) -> pa.Table:
    """One row per problem: its rewards, their mean, and the responses."""
    return pa.Table.from_pylist(
        [
            {
                "problem_id": row["problem_id"],
                "data_source": row["data_source"],
                "mean_reward": sum(valid) / len(valid) if (valid := [r for r in row["reward"] if r is not None]) else None,
                "rewards": row["reward"],
                "acc": row["acc"],
                "reward_status": row["reward_status"],
                "finish_reasons": row["finish_reason"],
                "response_lengths": [len(ids) for ids in row["response_ids"]],
                "responses": row["response_text"],
                "ground_truth": truth if isinstance(truth := typed_json.loads(row["ground_truth"]), str) else row["ground_truth"],
            }
            for row in rows
        ]
    )


if __name__ == "__main__":
    sys.exit(command("pipelines.evaluate", sys.argv[1:], __doc__ or "", "evaluate", run))
