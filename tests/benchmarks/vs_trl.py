"""The same training through TRL's GRPOTrainer and through this project, on this machine, one after the other:
`python -m tests.benchmarks.vs_trl [--worlds chain_arithmetic number_walk] [--generations 5] [--env outputs/trl]`

Same tiny model, prompts, group size (32 x 8), response budget and two updates per generation, float32 on the CPU. TRL, its newest
release, is installed into an environment of its own. Printed for each world: tokens per second end to end (prompt and new tokens,
no padding, over the wall time of a whole step), the median after a warm-up, and the mean length of a response beside its budget.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from pipelines.data import worlds

WARM_UP = 1  # steps
SEQUENCES = 256
UPDATES = 2  # per generation
ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "pipelines/assets/tiny"


@dataclass
class Measured:
    """Of each step after the warm-up: tokens per second and mean response length; of every step: mean reward."""

    rates: list[float]
    lengths: list[float]
    rewards: list[float]


def environment(folder: Path) -> str:
    """A Python with TRL; made if there is none."""
    python = folder / "bin" / "python"
    if subprocess.run([str(python), "-c", "import trl"], capture_output=True).returncode if python.exists() else True:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "trl", "torch==2.13.0"], check=True)
    return str(python)


def prompt_tokens(rows: list[dict]) -> float:
    """Mean length of the rendered prompts."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    return statistics.mean(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])


def through_trl(python: str, world: str, budget: int, generations: int, folder: Path) -> Measured:
    """TRL logs lengths and rewards once per generation; the first one has no beginning to count from."""
    rows = worlds.problem_rows(world, "train", 2048)
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    script, verifier = str(Path(__file__).with_name("trl_run.py")), str(ROOT / f"serve/verifiers/{world}.py")
    command = [python, script, str(MODEL), str(file), verifier, str(budget), str(UPDATES), str(generations)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    result = json.loads(done.stdout.strip().splitlines()[-1])
    ends, lengths, prompt = result["ends"][UPDATES - 1 :: UPDATES], result["lengths"][1:], prompt_tokens(rows)
    rates = [SEQUENCES * (prompt + n) / (b - a) for (a, b), n in zip(pairwise(ends), lengths, strict=True)]
    return Measured(rates, lengths, result["rewards"])


def through_this(world: str, steps: int, folder: Path) -> Measured:
    """One run of `pipelines.train`, read from its MLflow store."""
    import mlflow

    uri = f"sqlite:///{folder}/mlflow.db"
    overrides = [f"task={world}", f"steps={steps}", f"algorithm.minibatches={UPDATES}", "evaluation.every=0", "checkpoint.every=0"]
    overrides += [f"output_dir={folder}/out", f"tracking.uri={uri}", f"tracking.artifacts={folder}/artifacts"]
    subprocess.run([sys.executable, "-m", "pipelines.train", *overrides], check=True)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(world).experiment_id])

    def series(name: str) -> list[float]:
        return [m.value for m in client.get_metric_history(run.info.run_id, name)]

    rates, lengths = series("perf/throughput")[WARM_UP:], series("response_length/mean")[WARM_UP:]
    return Measured(rates, lengths, series("critic/score/mean"))


def compare(python: str, version: str, world: str, generations: int) -> None:
    """Both, one after the other, and what came of it."""
    budget = OmegaConf.load(ROOT / f"conf/task/{world}.yaml").max_new_tokens
    with tempfile.TemporaryDirectory() as folder:
        trl = through_trl(python, world, budget, generations, Path(folder))
        ours = through_this(world, generations, Path(folder))
    print(f"{world}: responses of {statistics.mean(ours.lengths):.0f} tokens, at most {budget}")
    for name, seen in ((f"TRL {version}", trl), ("this project", ours)):
        spread = f"{min(seen.rates):,.0f} to {max(seen.rates):,.0f} over {len(seen.rates)} steps"
        scores = " ".join(f"{reward:.2f}" for reward in seen.rewards)
        print(f"  {name:<14}{statistics.median(seen.rates):>8,.0f} tokens/s  ({spread}; mean reward by step {scores})")
    print(f"  {'ratio':<14}{statistics.median(ours.rates) / statistics.median(trl.rates):>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=["chain_arithmetic", "number_walk"])
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument("--env", type=Path, default=Path("outputs/trl"))
    args = parser.parse_args()
    python = environment(args.env.absolute())
    asked = [python, "-c", "import trl; print(trl.__version__)"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    for world in args.worlds:
        compare(python, version, world, args.generations)


if __name__ == "__main__":
    main()
