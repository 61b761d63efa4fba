"""Learning curves on a testbed world: `python -m tests.benchmarks.learning_curve --seeds 3 --out docs.png [key=value ...]`

Trains one run per seed, as a user would, and draws validation mean@n against steps with the seeds' mean and range. Runs that are
already in the MLflow store under the same name are drawn and not repeated.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import mlflow
import numpy as np

EXPERIMENT = "learning-curve"


def history(client: mlflow.MlflowClient, name: str, metric: str) -> dict[int, float] | None:
    """step -> value of a finished run of this name."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return None
    for run in client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'"):
        if run.info.status == "FINISHED":
            return {m.step: m.value for m in client.get_metric_history(run.info.run_id, metric)}
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--world", default="chain_arithmetic")
    parser.add_argument("--uri", default="sqlite:///mlflow.db")
    parser.add_argument("--out", default="outputs/learning_curve.png")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    client = mlflow.MlflowClient(args.uri)
    metric = f"val-core/{args.world}/acc/mean_at_4"
    curves = []
    for seed in range(args.seeds):
        name = f"grpo-{args.world}-{seed}"
        if history(client, name, metric) is None:
            arguments = [f"task={args.world}", f"seed={seed}", f"tracking.uri={args.uri}", f"tracking.experiment={EXPERIMENT}"]
            arguments += [f"tracking.run_name={name}", *args.overrides]
            subprocess.run([sys.executable, "-m", "pipelines.train", *arguments], check=True)
        curves.append(history(client, name, metric) or {})
    draw(curves, args.world, args.out)
    for step in sorted(curves[0]):
        values = [curve[step] for curve in curves if step in curve]
        print(f"step {step:>3}  " + "  ".join(f"{value:.3f}" for value in values) + f"  mean {np.mean(values):.3f}")


def draw(curves: list[dict[int, float]], world: str, out: str) -> None:
    """Mean over seeds as a line, each seed thin."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8), dpi=150)
    for seed, curve in enumerate(curves):
        axes.plot(
            *zip(*sorted(curve.items()), strict=True), color="tab:blue", alpha=0.3, linewidth=1, label=None if seed else "one seed"
        )
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    axes.plot(
        steps, [np.mean([curve[s] for curve in curves]) for s in steps], color="tab:blue", linewidth=2.2, marker="o", label="mean"
    )
    axes.set(
        xlabel="GRPO steps (32 problems x 8 responses)", ylabel="validation mean@4", ylim=(0, 1), title=world.replace("_", " ")
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    print(f"figure written to {out}")


if __name__ == "__main__":
    main()
