"""The TRL side of `vs_trl`: runs in an environment of its own, trains, and prints one line of JSON.

`python trl_run.py MODEL ROWS.jsonl VERIFIER.py BUDGET UPDATES GENERATIONS`; needs trl and torch, and of this project only the file
that scores a response.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP = 32, 8


def reward_function(verifier):
    """The world's own verifier as TRL calls it."""
    spec = importlib.util.spec_from_file_location("verifier", verifier)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(completions, ground_truth, **_):
        return [
            module.score(completion[0]["content"], truth, {}) for completion, truth in zip(completions, ground_truth, strict=True)
        ]

    return reward


class Clock(TrainerCallback):
    """When each optimizer step ended, and what was logged with it."""

    def __init__(self):
        self.ends, self.logs = [], []

    def on_step_end(self, args, state, control, **_):
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(logs)


def main(model, rows, verifier, budget, updates, generations):
    torch.set_num_threads(2)
    rows = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows])
    clock = Clock()
    config = GRPOConfig(
        output_dir="/tmp/trl-run",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * GROUP // updates,
        steps_per_generation=updates,
        num_generations=GROUP,
        max_completion_length=budget,
        max_steps=generations * updates,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.01,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="none",
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward_function(verifier), args=config, train_dataset=dataset, callbacks=[clock]
    )
    trainer.train()
    lengths = [log["completions/mean_length"] for log in clock.logs if "completions/mean_length" in log]
    rewards = [log["reward"] for log in clock.logs if "reward" in log]
    print(json.dumps({"ends": clock.ends, "lengths": lengths, "rewards": rewards}))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
