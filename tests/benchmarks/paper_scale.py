"""A step of AC2 at the paper's own sizes, without a model: `python -m tests.benchmarks.paper_scale [--prefixes 48 96 192]`

Plan, rollout dataset, judge, credit, ingest, the critic's draw and Parquet buffer are the real ones; engines are a stand-in that
makes up continuations of 10,000 to 50,000 tokens at once. All that is left is overhead: its seconds, peak memory and disk.
"""

import argparse
import dataclasses
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from algorithms.flops import DecodingCost
from algorithms.self_critic import SelfCriticPrompt
from algorithms.types import Problem
from pipelines.command import cluster
from pipelines.config.run import RunConfig
from pipelines.data.model_folder import read_model_config
from pipelines.engines.config import Sampling
from pipelines.rollout.coordinator import Coordinator, CoordinatorConfig
from pipelines.rollout.dataset import rollout_dataset
from pipelines.store.tracker import TrackingConfig
from pipelines.trainer.batching import trainer_rows
from pipelines.trainer.link import CoordinatorLink
from serve import judge
from serve.scoring import Scoring
from tests.conftest import configure

BUDGET, PROMPT_TOKENS, PROBLEMS = 50_000, 300, 1000
SHORTEST = 10_000
PROMPT = SelfCriticPrompt((7,), tuple(range(100)), tuple(range(90)), tuple(range(40)), tuple((10 + i, 1) for i in range(11)))


class StandIn:
    """Answers as the engines do: lengths, tokens and values from the row's seed; one text stands for all."""

    def generate(self, rows: list[dict[str, Any]], sampling: Sampling, critic: Any) -> list[dict[str, Any]]:
        return [self._completion(row) for row in rows]

    def _completion(self, row: dict[str, Any]) -> dict[str, Any]:
        rng, n = np.random.default_rng(row["seed"]), row["n"]
        lengths = np.minimum(rng.integers(SHORTEST, BUDGET, n), row["max_new_tokens"])
        owned = [bool(row["chunk"] and length == row["max_new_tokens"]) for length in lengths]
        return {
            "response_ids": [rng.integers(10, 150_000, length, dtype=np.int32) for length in lengths],
            "response_text": ["37+5=42;" * (length // 2) + "#33" for length in lengths],  # about four characters a token
            "rollout_logprobs": [rng.random(length, dtype=np.float32) for length in lengths],
            "finish_reason": ["length" if own else "stop" for own in owned],
            "truncated": [False for _ in owned],
            "self_scored": owned,
            "endpoint_value": [round(float(rng.integers(11)) / 10, 1) if own else None for own in owned],
            "prefix_value": 0.3 if row["ask_value"] else None,
            "reference_left_out": False,
        }


def sized(config: RunConfig, prefixes: int) -> Any:
    """Table 4's AC2 with this many prefixes; all else that counts trajectories in proportion."""
    share = prefixes / 192
    replay = dataclasses.replace(config.algorithm.replay, capacity=int(256 * share), refill_problems=prefixes, cut_grid=10_000)
    critic = dataclasses.replace(config.algorithm.self_critic, buffer_pairs=int(1920 * share), pairs_per_update=int(768 * share))
    readiness = dataclasses.replace(config.algorithm.readiness, global_threshold=1.0, local_threshold=0.5)  # so that chunks occur
    return dataclasses.replace(
        config.algorithm,
        problems_per_step=prefixes,
        group_size=16,
        max_new_tokens=BUDGET,
        chunk_tokens=10_000,
        min_valid=8,
        replay=replay,
        self_critic=critic,
        readiness=readiness,
        reference_reward=0.0,
    )


def settings(config: RunConfig, folder: Path) -> CoordinatorConfig:
    """A coordinator's settings as a run has them, in a folder of its own."""
    tracking = TrackingConfig(f"sqlite:///{folder}/mlflow.db", str(folder / "artifacts"), "paper-scale", None, 0, False)
    return CoordinatorConfig(
        seed=0,
        steps=10,
        logprob_diff_alarm=1.0,
        max_missing_reward=1.0,
        keep_steps=(),
        reward_range=(0.0, 1.0),
        evaluation=config.evaluation,
        eval_max_new_tokens=BUDGET,
        sampling=config.sampling,
        keep_rollouts=1,
        output_dir=str(folder),
        replay_url=str(folder / "replay"),
        replay_start_from=None,
        tokenizer_hash="stand-in",
        self_critic_prompt=PROMPT,
        context_limit=2 * BUDGET + 1000,
        tracking=tracking,
        params={},
        tags={},
    )


def measure(config: RunConfig, prefixes: int, steps: int) -> dict[str, float]:
    """The last of some steps: seconds by part, memory of the coordinator and of this process, bytes on disk."""
    folder = Path(tempfile.mkdtemp())
    algorithm = sized(config, prefixes)
    rng = np.random.default_rng(0)
    problems = [
        Problem(f"p{i}", "chain_arithmetic", rng.integers(10, 150_000, PROMPT_TOKENS).tolist(), "33") for i in range(PROBLEMS)
    ]
    cost = DecodingCost.of_config(read_model_config(config.model.path))
    remote: Any = ray.remote(Coordinator)
    coordinator = remote.options(num_cpus=0.1).remote(settings(config, folder), algorithm, problems, problems[:1], cost, None)
    engines: Any = StandIn()
    dataset = rollout_dataset(CoordinatorLink(coordinator), engines, config.judge, algorithm, {"train": config.sampling}, blocks=8)
    took: dict[str, float] = {}
    for step in range(1, steps + 1):
        began = time.perf_counter()
        ray.get(coordinator.plan.remote(step, 0, step - 1))
        planned = time.perf_counter()
        tokens = 0
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            tokens += sum(len(ids) for row in trainer_rows(batch, algorithm.credit_type) for ids in row["response_ids"])
        delivered = time.perf_counter()
        recalled = ray.get(coordinator.recall.remote(step, 0, 4))
        drawn = time.perf_counter()
        ray.get(coordinator.remember.remote(recalled.values))
        ray.get(coordinator.finish_step.remote(step, {}))
        ended = time.perf_counter()
        took = {
            "tokens": float(tokens),
            "plan_s": planned - began,
            "rollout_s": delivered - planned,
            "critic_s": drawn - delivered,
            "finish_s": ended - drawn,
            "step_s": ended - began,
        }
        print(
            json.dumps({"prefixes": prefixes, "step": step} | {name: round(value, 2) for name, value in took.items()}), flush=True
        )
    took["coordinator_gib"] = ray.get(coordinator.__ray_call__.remote(lambda _: peak_gib()))
    took["replay_mib"] = sum(file.stat().st_size for file in (folder / "replay").iterdir()) / 2**20
    took["rollouts_mib"] = sum(file.stat().st_size for file in (folder / "rollouts").iterdir()) / 2**20
    ray.get(coordinator.close.remote("FINISHED"))
    ray.kill(coordinator)
    shutil.rmtree(folder)
    return took


def peak_gib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[48, 96, 192])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--object-store-gib", type=float, default=6.0)
    args = parser.parse_args()
    config = configure("algorithm=ac2", f"cluster.ray.object_store_gib={args.object_store_gib}")
    cluster.connect(config.ray)
    judge.start(config.judge, Scoring(), "outputs")
    results = {prefixes: measure(config, prefixes, args.steps) for prefixes in args.prefixes}
    names = list(next(iter(results.values())))
    print("\n" + "prefixes".ljust(18) + "".join(f"{prefixes:>12}" for prefixes in results))
    for name in names:
        print(name.ljust(18) + "".join(f"{result[name]:>12,.2f}" for result in results.values()))
    if len(results) > 1:
        xs, ys = np.array(list(results)), np.array([result["step_s"] for result in results.values()])
        slope, intercept = np.polyfit(xs, ys, 1)
        worst = np.abs(ys - (slope * xs + intercept)).max()
        print(f"\nseconds = {intercept:.1f} + {slope:.3f} x prefixes; the worst point is {worst:.1f} s off the line")
    ray.shutdown()


if __name__ == "__main__":
    main()
