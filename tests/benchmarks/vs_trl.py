"""The same training through TRL's GRPOTrainer and through this project, on this machine, one after the other:
`python -m tests.benchmarks.vs_trl [--generations 5] [--env outputs/trl]`

Same tiny model, prompts, group size (32 x 8), response budget (104 tokens) and two updates per generation, float32 on the CPU. TRL,
its newest release, is installed into an environment of its own. Printed: tokens per second end to end (prompt and new tokens over
the wall time of a whole step), the median after a warm-up.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from pipelines import testbed

WARM_UP = 1  # steps
PROMPT_TOKENS = 28
SEQUENCES = 256
MODEL = Path(__file__).parent.parent.parent / "pipelines/assets/tiny"


def environment(folder: Path) -> str:
    """A Python with TRL; made if there is none."""
    python = folder / "bin" / "python"
    if subprocess.run([str(python), "-c", "import trl"], capture_output=True).returncode if python.exists() else True:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "trl", "torch==2.13.0"], check=True)
    return str(python)


def through_trl(python: str, generations: int, folder: Path) -> tuple[list[float], list[float], str]:
    """Tokens per second of each generation with its updates, mean rewards, TRL's version."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(row) for row in testbed.problem_rows("chain_arithmetic", "train", 2048)))
    script = str(Path(__file__).with_name("trl_run.py"))
    command = [python, script, str(MODEL), str(rows), str(generations)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    result = json.loads(done.stdout.strip().splitlines()[-1])
    updates = 2
    ends = result["ends"][updates - 1 :: updates]
    # TRL logs lengths and rewards once per generation. The first one has no beginning to count from.
    rates = [SEQUENCES * (PROMPT_TOKENS + n) / (b - a) for (a, b), n in zip(pairwise(ends), result["lengths"][1:], strict=True)]
    version = subprocess.run([python, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True, check=True)
    return rates, result["rewards"], version.stdout.strip().splitlines()[-1]


def through_this(steps: int, folder: Path) -> tuple[list[float], list[float]]:
    """Tokens per second of each step, mean rewards."""
    import mlflow

    uri = f"sqlite:///{folder}/mlflow.db"
    overrides = [f"steps={steps}", "evaluation.every=0", "checkpoint.every=0", f"output_dir={folder}/out", f"tracking.uri={uri}"]
    subprocess.run([sys.executable, "-m", "pipelines.train", *overrides, f"tracking.artifacts={folder}/artifacts"], check=True)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("chain_arithmetic").experiment_id])

    def series(name: str) -> list[float]:
        return [m.value for m in client.get_metric_history(run.info.run_id, name)]

    return series("perf/throughput")[WARM_UP:], series("critic/score/mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument("--env", type=Path, default=Path("outputs/trl"))
    args = parser.parse_args()
    python = environment(args.env.absolute())
    with tempfile.TemporaryDirectory() as folder:
        trl, trl_rewards, version = through_trl(python, args.generations, Path(folder))
        ours, our_rewards = through_this(args.generations, Path(folder))
    for name, rates, rewards in ((f"TRL {version}", trl, trl_rewards), ("this project", ours, our_rewards)):
        spread = f"{min(rates):,.0f} to {max(rates):,.0f} over {len(rates)} steps"
        scores = " ".join(f"{reward:.2f}" for reward in rewards)
        print(f"{name:<14}{statistics.median(rates):>8,.0f} tokens/s  ({spread}; mean reward by step {scores})")
    print(f"{'ratio':<14}{statistics.median(ours) / statistics.median(trl):>8.1f}")


if __name__ == "__main__":
    main()
