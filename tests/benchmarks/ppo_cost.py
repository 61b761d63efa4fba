"""What PPO's critic and reference add to a step: `python -m tests.benchmarks.ppo_cost [--groups 64] [--steps 5] [--repeats 2]`

Runs GRPO and PPO on the testbed with one optimizer step of the actor per batch each, in turn, at a learning rate of 0 so that both
roll out alike, and prints the median seconds of a step with its parts, and the ratio of each repeat.
"""

import argparse
import statistics
import tempfile

from tests.benchmarks.step_overhead import WARM_UP, loop_timings

PARTS = ("step", "gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")
ALGORITHMS = {
    "GRPO": ("algorithm=grpo", "algorithm.minibatches=1"),
    "PPO": ("algorithm=ppo", "algorithm.critic.lr=0", "algorithm.critic.warmup_steps=0"),
    "EasyPPO": ("algorithm=easyppo", "algorithm.critic.lr=0", "algorithm.critic.warmup_steps=0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="measured, after a warm-up")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    steps: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    for _ in range(args.repeats):
        for name, overrides in ALGORITHMS.items():
            with tempfile.TemporaryDirectory() as folder:
                found = loop_timings(args.groups, WARM_UP + args.steps, folder, *overrides, "optimizer.lr=0")
            steps[name].append(statistics.median(found["timing_s/step"]))
            parts = {part: statistics.median(found.get(f"timing_s/{part}") or [0.0]) for part in PARTS}
            print(f"{name:>10}  " + "  ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items()), flush=True)
    for name in list(ALGORITHMS)[1:]:
        ratios = [own / grpo for own, grpo in zip(steps[name], steps["GRPO"], strict=True)]
        print(f"{name} over GRPO: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
