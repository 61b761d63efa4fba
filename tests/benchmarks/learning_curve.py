"""Algorithms against each other on a testbed world, some seeds each, and the report of them:
`python -m tests.benchmarks.learning_curve --world number_walk --algorithms grpo prefix_grpo ac2 --seeds 3 [key=value ...]`

Trains one run per algorithm and seed, as a user would. Runs that the MLflow store already has under the same name are not repeated.
An algorithm may carry changes of its own: `ac2,algorithm.chunk_tokens=16`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import mlflow

from pipelines.report.__main__ import main as report


def finished(client: mlflow.MlflowClient, experiment: str, name: str) -> bool:
    """Whether a run of this name has come to its end."""
    known = client.get_experiment_by_name(experiment)
    if known is None:
        return False
    runs = client.search_runs([known.experiment_id], f"attributes.run_name = '{name}'")
    return any(run.info.status == "FINISHED" for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["grpo"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--world", default="chain_arithmetic")
    parser.add_argument("--uri", default="sqlite:///mlflow.db")
    parser.add_argument("--experiment", help="name of the MLflow experiment; the world's unless given")
    parser.add_argument("--out", default="outputs/learning_curve.html")
    args, overrides = parser.parse_known_args()
    overrides += [spec for spec in args.algorithms if "=" in spec.partition(",")[0]]
    args.algorithms = [spec for spec in args.algorithms if spec not in overrides]
    client = mlflow.MlflowClient(args.uri)
    experiment = args.experiment or f"learning-curve-{args.world}"
    for seed in range(args.seeds):
        for spec in args.algorithms:
            algorithm, *own = spec.split(",")
            name = "-".join([algorithm, *(change.rpartition(".")[2] for change in own), str(seed)])
            if finished(client, experiment, name):
                continue
            arguments = [f"algorithm={algorithm}", f"task={args.world}", f"seed={seed}", f"tracking.uri={args.uri}"]
            arguments += [f"tracking.experiment={experiment}", f"tracking.run_name='{name}'", *overrides, *own]
            subprocess.run([sys.executable, "-m", "pipelines.train", *arguments], check=True)
    report(["compare", f"experiment={experiment}", f"uri={args.uri}", f"out={Path(args.out)}"])


if __name__ == "__main__":
    main()
