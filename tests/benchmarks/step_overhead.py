"""What the loop costs: one real step against the same rollouts and the same update without it.

`python -m tests.benchmarks.step_overhead [--groups 64] [--steps 6]` prints, from one run on one machine,
  loop   a step of `pipelines.train` (Ray Data, engine actor, judge, two trainer ranks, weight sync), the median after a warm-up,
  bare   the same requests through `vllm.LLM.generate` in one process, then the same update in a plain loop over the same model,
and their ratio, with the loop's own timings beneath it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM_UP = 2


def loop_timings(groups: int, steps: int, folder: str, *more: str) -> dict[str, list[float]]:
    """Run the product for some steps, with more overrides if given, and read its timings from MLflow."""
    import mlflow

    uri = f"sqlite:///{folder}/mlflow.db"
    overrides = [f"algorithm.problems_per_step={groups}", f"steps={steps}", "evaluation.every=0", "checkpoint.every=0"]
    overrides += [f"output_dir={folder}/out", f"tracking.uri={uri}", f"tracking.artifacts={folder}/artifacts"]
    subprocess.run([sys.executable, "-m", "pipelines.train", *overrides, *more], check=True)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("chain_arithmetic").experiment_id])
    names = [name for name in run.data.metrics if name.startswith("timing_s/")] + ["decode/tokens"]
    return {name: [m.value for m in client.get_metric_history(run.info.run_id, name)][WARM_UP:] for name in names}


def bare_generation(requests: list[dict[str, Any]], model: str) -> tuple[float, list[list[list[int]]], list[list[list[float]]]]:
    """Seconds, token ids and log-probabilities of the same requests through `vllm.LLM.generate`."""
    from vllm import LLM, SamplingParams

    from tests.conftest import configure

    engines = configure().engines
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=engines.max_num_seqs,
        max_num_batched_tokens=engines.max_num_batched_tokens,
        block_size=engines.block_size,
        enforce_eager=True,
        enable_chunked_prefill=False,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def generate() -> tuple[float, Any]:
        params = [
            SamplingParams(n=r["n"], seed=r["seed"] % 2**31, max_tokens=r["max_new_tokens"], logprobs=0, flat_logprobs=True,
                           detokenize=False, stop_token_ids=[1])
            for r in requests
        ]  # fmt: skip
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": r["prompt_ids"]} for r in requests], params, use_tqdm=False)
        return time.perf_counter() - start, outputs

    generate()
    seconds, outputs = min((generate() for _ in range(3)), key=lambda pair: pair[0])
    ids = [[list(o.token_ids) for o in output.outputs] for output in outputs]
    logprobs = [[list(o.logprobs.logprobs) for o in output.outputs] for output in outputs]
    return seconds, ids, logprobs


def bare_update(rows: list[dict[str, Any]], ids: list, logprobs: list, model: str) -> float:
    """Seconds of old log-probabilities and two clipped minibatches in a plain single-process loop of two threads."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01)
    samples = [
        (row["prompt_ids"] + response, len(row["prompt_ids"]), rollout, 1.0 if j % 2 else -1.0)
        for row, responses, rollouts in zip(rows, ids, logprobs, strict=True)
        for j, (response, rollout) in enumerate(zip(responses, rollouts, strict=True))
    ]

    def forward(batch):
        length = max(len(sample[0]) for sample in batch)
        tokens = torch.zeros(len(batch), length, dtype=torch.long)
        mask = torch.zeros(len(batch), length - 1, dtype=torch.bool)
        for i, (sequence, prompt, _, _) in enumerate(batch):
            tokens[i, : len(sequence)] = torch.tensor(sequence)
            mask[i, prompt - 1 : len(sequence) - 1] = True
        hidden = lm.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][mask]
        log_softmax = lm.lm_head(hidden).log_softmax(-1)
        return log_softmax.gather(-1, tokens[:, 1:][mask][:, None])[:, 0], -(log_softmax.detach().exp() * log_softmax.detach()).sum(
            -1
        )

    def batches(chosen, cap=16384):
        chosen = sorted(chosen, key=lambda sample: -len(sample[0]))
        while chosen:
            take = cap // len(chosen[0][0])
            yield chosen[:take]
            chosen = chosen[take:]

    start = time.perf_counter()
    old = {}
    with torch.no_grad():
        for batch in batches(samples):
            values, at = forward(batch)[0], 0
            for sample in batch:
                size = len(sample[0]) - sample[1]
                old[id(sample)], at = values[at : at + size], at + size
    for k in range(2):
        minibatch = samples[k * len(samples) // 2 : (k + 1) * len(samples) // 2]
        tokens = sum(len(sample[2]) for sample in minibatch)
        for batch in batches(minibatch):
            new, _ = forward(batch)
            before = torch.cat([old[id(sample)] for sample in batch])
            rollout = torch.tensor(np.concatenate([sample[2] for sample in batch]))
            advantage = torch.cat([torch.full((len(sample[2]),), sample[3]) for sample in batch])
            ratio = (new - before).exp()
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)) * (before - rollout).exp().clamp(max=2.0)
            (loss.sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        timings = loop_timings(args.groups, args.steps, folder)
        rows = pq.read_table(Path(folder) / "out" / "rollouts" / f"step_{args.steps:06d}.parquet").to_pylist()
        model = str(Path(folder) / "out" / "checkpoints" / f"step_{args.steps:06d}" / "model")
        os.environ |= {"OMP_NUM_THREADS": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
        generation, ids, logprobs = bare_generation(rows, model)
        update = min(bare_update(rows, ids, logprobs, model) for _ in range(3))
    step = statistics.median(timings["timing_s/step"])
    spread = f"{min(timings['timing_s/step']):.2f} to {max(timings['timing_s/step']):.2f}"
    print(f"\n{args.groups} groups x {rows[0]['n']}, {sum(len(r) for group in ids for r in group)} new tokens")
    print(f"  loop  {step:6.2f} s  ({spread} over {len(timings['timing_s/step'])} steps)")
    print(f"  bare  {generation + update:6.2f} s  (generate {generation:.2f}, update {update:.2f})")
    print(f"  ratio {step / (generation + update):6.2f}")
    for name, values in sorted(timings.items()):
        if name != "timing_s/step":
            print(f"    {name:<28}{statistics.median(values):10.2f}")


if __name__ == "__main__":
    main()
