"""One vLLM engine in a Ray actor: token ids in, token ids and log-probabilities out, from weights of a known version."""

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

SEED_RANGE = 2**31
CURRENT, RESTARTS = "current.json", "engine_restarts"  # in the folder of weights: which of them engines should have; who came back


@dataclass(frozen=True)
class EngineConfig:
    """How many engines there are and what each of them gets."""

    count: int
    tensor_parallel_size: int
    num_cpus: float
    num_gpus: float
    threads: int  # OpenMP threads of one engine on CPUs
    kv_cache_gib: float  # KV cache of one engine on CPUs
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    enforce_eager: bool
    start_timeout_s: float
    request_timeout_s: float  # of one block's generation; an engine that takes longer is taken for hung
    sync_timeout_s: float
    max_restarts: int  # of one engine that died or hung, in a run
    weight_sync: str  # checkpoint | nccl

    def __post_init__(self) -> None:
        if self.weight_sync not in ("checkpoint", "nccl"):
            raise ValueError(f"cluster.engines.weight_sync={self.weight_sync}: use checkpoint or nccl.")
        if self.weight_sync == "nccl" and not self.num_gpus:
            raise ValueError("cluster.engines.weight_sync=nccl needs engines on GPUs; use checkpoint.")
        if self.weight_sync == "nccl" and self.max_restarts:
            raise ValueError(
                "cluster.engines.weight_sync=nccl: an engine that starts again cannot join the group of the others; set "
                "cluster.engines.max_restarts=0 (the run then goes on from its last checkpoint) or use checkpoint."
            )


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Training refuses top-p and top-k: the trainer could not reproduce their probabilities."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1

    def check_for_training(self) -> None:
        """ValueError if log-probabilities of samples would not be those of the policy at its temperature."""
        if self.top_p != 1.0 or self.top_k not in (-1, 0) or self.temperature <= 0:
            raise ValueError(
                f"sampling(temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}): training samples the whole "
                "distribution; use temperature > 0, top_p=1 and top_k=-1 (evaluation may differ)."
            )


class Engine:
    """Steps a vLLM `LLMEngine` in one thread while callers wait for their groups: continuous batching across all of them."""

    def __init__(
        self, model_path: str, dtype: str, max_model_len: int, config: EngineConfig, seed: int, weights_dir: str | None = None
    ) -> None:
        # vLLM and transformers load here and not with the module: every stage of the rollout dataset imports it.
        from vllm import EngineArgs, LLMEngine

        from pipelines.prompts import load_tokenizer, stop_ids

        arguments: dict[str, Any] = {
            "model": model_path,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "tensor_parallel_size": config.tensor_parallel_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "enforce_eager": config.enforce_eager,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "generation_config": "vllm",
            "seed": seed,
            "worker_extension_cls": "pipelines.engine_worker.WeightLoader",
        }
        if config.weight_sync == "nccl":
            arguments["weight_transfer_config"] = {"backend": "nccl"}
        if config.block_size is not None:
            arguments["block_size"] = config.block_size
        if config.num_gpus:
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        else:
            # A prefill cut in two rewinds its request's random generator, which vLLM 0.32 cannot do on a CPU.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(config.max_num_batched_tokens, max_model_len)
        self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._tokenizer = load_tokenizer(model_path)
        self._stop_ids = stop_ids(model_path, self._tokenizer)
        self._version = 0
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._waiting: dict[str, Future[Any]] = {}
        self._ids = itertools.count()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="engine").start()
        if weights_dir is not None and _started_again():
            with open(Path(weights_dir) / RESTARTS, "a") as stream:
                print(f"{time.time():.0f}", file=stream)
            self.load_weights(**json.loads((Path(weights_dir) / CURRENT).read_text()))

    # -- what callers use --------------------------------------------------------------------------------------------

    def generate(self, requests: list[dict[str, Any]], sampling: Sampling) -> list[dict[str, Any]]:
        """Continue each request (`prompt_ids`, `prefix_ids`, `n`, `max_new_tokens`, `seed`) `n` times; blocks until all are done.

        Returns per request `response_ids`, `response_text`, `rollout_logprobs`, `finish_reason` (lists of n) and `policy_version`.
        """
        futures = [self._call(partial(self._submit, request, sampling)) for request in requests]
        outputs = [future.result().result() for future in futures]
        return [self._completion(output) for output in outputs]

    def load_weights(self, path: str, version: int, checksum: str) -> dict[str, Any]:
        """Load a folder of safetensors, forget all cached prefixes and take the version; confirms the checksum or raises.

        Groups that are still being generated are given up: only a trainer that has started again asks for weights before its time.
        """

        def load() -> dict[str, Any]:
            self._give_up(f"the trainer went on to weights version {version}")
            for found in self._llm.collective_rpc("load_checkpoint_weights", args=(path,)):
                for kind, value in found.items():
                    if value and value != checksum:
                        raise RuntimeError(f"weights version {version}: {kind} checksum {value} is not the trainer's {checksum}.")
            return self._take_version(version) | {"checksum": checksum}

        return self._call(load).result()

    def transfer(self, method: str, *arguments: Any) -> None:
        """Call a method of vLLM's weight transfer in every worker of this engine."""
        self._call(lambda: self._llm.collective_rpc(method, args=arguments)).result()

    def finish_transfer(self, version: int) -> dict[str, Any]:
        """End a weight transfer: process what arrived, forget all cached prefixes and take the version."""

        def finish() -> dict[str, Any]:
            self._give_up(f"the trainer went on to weights version {version}")
            self._llm.collective_rpc("finish_weight_update")
            return self._take_version(version)

        return self._call(finish).result()

    def version(self) -> int:
        """The policy version of the weights; answers once the engine is up."""
        return self._version

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _call(self, action: Callable[[], Any]) -> Future[Any]:
        """Run `action` in the engine's thread, the only one that may touch the engine."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure}") from self._failure
        self._inbox.put(run)
        return future

    def _submit(self, request: dict[str, Any], sampling: Sampling) -> Future[Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=request["n"],
            max_tokens=request["max_new_tokens"],
            seed=request["seed"] % SEED_RANGE,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=self._stop_ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name, future = str(next(self._ids)), Future[Any]()
        prompt = TokensPrompt(prompt_token_ids=[*request["prompt_ids"], *request["prefix_ids"]])
        self._llm.add_request(name, prompt, params)
        self._waiting[name] = future
        return future

    def _run(self) -> None:
        try:
            while True:
                while not self._llm.has_unfinished_requests() or not self._inbox.empty():
                    self._inbox.get()()
                for output in self._llm.step():
                    if output.finished and output.request_id in self._waiting:
                        self._waiting.pop(output.request_id).set_result(output)
        except BaseException as error:  # nobody may wait for a dead thread
            self._failure = error
            for future in self._waiting.values():
                future.set_exception(RuntimeError(f"the engine stopped in mid-generation: {error}"))

    def _take_version(self, version: int) -> dict[str, Any]:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(f"weights version {version}: the prefix cache could not be reset.")
        self._version = version
        return {"version": version}

    def _give_up(self, reason: str) -> None:
        self._llm.abort_request(list(self._waiting), internal=False)
        for future in self._waiting.values():
            future.set_exception(RuntimeError(f"generation was given up: {reason}."))
        self._waiting.clear()

    def _completion(self, output: Any) -> dict[str, Any]:
        completions = sorted(output.outputs, key=lambda one: one.index)
        ids = [list(one.token_ids) for one in completions]
        return {
            "response_ids": ids,
            "response_text": self._tokenizer.batch_decode(ids, skip_special_tokens=True),
            "rollout_logprobs": [list(one.logprobs.logprobs) for one in completions],
            "finish_reason": [one.finish_reason for one in completions],
            "policy_version": self._version,
        }


def _started_again() -> bool:
    """Whether Ray has started this actor anew after it died or was killed for hanging."""
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and context.was_current_actor_reconstructed


def restarts(weights_dir: str) -> int:
    """How often engines of a run have been started again."""
    file = Path(weights_dir) / RESTARTS
    return len(file.read_text().splitlines()) if file.is_file() else 0


def environment(config: EngineConfig) -> dict[str, str]:
    """Environment of an engine actor: in-process and thread-bound on CPUs, where spinning processes starve each other."""
    shared = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if config.num_gpus:
        return shared
    return shared | {
        "OMP_NUM_THREADS": str(config.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
    }
