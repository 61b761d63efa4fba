"""Learning curves on a testbed world, decoding FLOPs on the axis:
`python -m tests.benchmarks.learning_curve --algorithms grpo prefix_grpo --seeds 3 --out figure.png [key=value ...]`

Trains one run per algorithm and seed, as a user would, and draws validation mean@n against the decoding FLOPs spent. Runs that the
MLflow store already has under the same name are drawn and not repeated.
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
LABELS = {"grpo": "GRPO", "prefix_grpo": "Prefix GRPO"}

Curve = list[tuple[int, float, float]]  # step, decoding FLOPs so far, score


def curve_of(client: mlflow.MlflowClient, name: str, metric: str) -> Curve | None:
    """The evaluations of a finished run of this name."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return None
    for run in client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'"):
        if run.info.status == "FINISHED":
            flops = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "decode/flops_total")}
            scores = {m.step: m.value for m in client.get_metric_history(run.info.run_id, metric)}
            return [(step, flops[step], scores[step]) for step in sorted(scores)]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["grpo"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--world", default="chain_arithmetic")
    parser.add_argument("--uri", default="sqlite:///mlflow.db")
    parser.add_argument("--out", default="outputs/learning_curve.png")
    args, overrides = parser.parse_known_args()
    client = mlflow.MlflowClient(args.uri)
    metric = f"val-core/{args.world}/acc/mean_at_4"
    curves: dict[str, list[Curve]] = {}
    for algorithm in args.algorithms:
        for seed in range(args.seeds):
            name = f"{algorithm}-{args.world}-{seed}"
            if curve_of(client, name, metric) is None:
                arguments = [f"algorithm={algorithm}", f"task={args.world}", f"seed={seed}", f"tracking.uri={args.uri}"]
                arguments += [f"tracking.experiment={EXPERIMENT}", f"tracking.run_name={name}", *overrides]
                subprocess.run([sys.executable, "-m", "pipelines.train", *arguments], check=True)
            curves.setdefault(algorithm, []).append(curve_of(client, name, metric) or [])
    draw(curves, args.world, args.out)
    for algorithm, seeds in curves.items():
        print(f"\n{LABELS.get(algorithm, algorithm)}: step, TFLOP, score of each seed, mean")
        for points in zip(*seeds, strict=True):
            scores = [score for _, _, score in points]
            listed = "  ".join(f"{score:.3f}" for score in scores)
            print(f"{points[0][0]:>4}  {np.mean([f for _, f, _ in points]) / 1e12:8.3f}  {listed}  {np.mean(scores):.3f}")


def draw(curves: dict[str, list[Curve]], world: str, out: str) -> None:
    """One colour per algorithm: the seeds' mean as a line, each seed thin."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8), dpi=150)
    for colour, (algorithm, seeds) in zip(("tab:blue", "tab:orange", "tab:green"), curves.items(), strict=False):
        for curve in seeds:
            axes.plot([f / 1e12 for _, f, _ in curve], [s for *_, s in curve], color=colour, alpha=0.3, linewidth=1)
        mean = np.mean(np.array(seeds), axis=0)
        label = f"{LABELS.get(algorithm, algorithm)} (mean of {len(seeds)} seeds)"
        axes.plot(mean[:, 1] / 1e12, mean[:, 2], color=colour, linewidth=2.2, marker="o", markersize=4, label=label)
    axes.set(xlabel="decoding TFLOP", ylabel="validation mean@4", ylim=(0, 1), title=world.replace("_", " "))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    print(f"figure written to {out}")


if __name__ == "__main__":
    main()
