"""One vLLM engine in a Ray actor: token ids in, token ids and log-probabilities out, from weights of a known version."""

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from algorithms.self_critic import MAX_ANSWER_TOKENS, parse_value
from pipelines.engines.config import EngineConfig, Sampling
from pipelines.engines.self_critic import SelfCritic

SEED_RANGE = 2**31
WORKER_EXTENSION = "pipelines.weights.worker.WeightLoader"  # vLLM imports it by name in its own processes
CURRENT, RESTARTS = "current.json", "engine_restarts"  # files in the folder of weights: the current ones, and a line per restart


@dataclass(frozen=True)
class Question:
    """One that was put to the self-critic; `answer` is None where it was not, or was too long to be."""

    answer: Future[Any] | None
    reference_left_out: bool


NOT_ASKED = Question(None, False)
QUESTION = "question-"  # begins the names of requests that are the self-critic's


class Engine:
    """Steps a vLLM `LLMEngine` in one thread while callers wait for their groups: continuous batching across all of them."""

    def __init__(
        self, model_path: str, dtype: str, max_model_len: int, config: EngineConfig, seed: int, weights_dir: str | None = None
    ) -> None:
        # vLLM and transformers load here and not with the module: every stage of the rollout dataset imports it.
        from vllm import EngineArgs, LLMEngine

        from pipelines.data.model_folder import has_language_part, read_model_config
        from pipelines.data.prompts import load_tokenizer, stop_ids

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
            "worker_extension_cls": WORKER_EXTENSION,
        }
        model = read_model_config(model_path)
        if has_language_part(model):
            arguments["language_model_only"] = True
        if config.weight_sync == "nccl":
            arguments["weight_transfer_config"] = {"backend": "nccl"}
        if config.block_size is not None:
            arguments["block_size"] = config.block_size
        if config.num_gpus:
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        else:
            # A prefill cut in two rewinds its request's random generator, which vLLM 0.32 cannot do on a CPU.
            arguments["enable_chunked_prefill"] = False
            # The states of gated delta nets are only cached where prefills are cut.
            arguments["enable_prefix_caching"] = "linear_attention" not in (model.get("layer_types") or [])
            arguments["max_num_batched_tokens"] = max(config.max_num_batched_tokens, max_model_len)
        self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._tokenizer = load_tokenizer(model_path)
        self._stop_ids = stop_ids(model_path, self._tokenizer)
        self._version = 0
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._waiting: dict[str, Future[Any]] = {}
        self._ids = itertools.count()
        self._load = {False: 0, True: 0}  # sequences in work, by whether they are the self-critic's
        self._question_seconds = 0.0
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="engine").start()
        if weights_dir is not None and _started_again():
            with open(Path(weights_dir) / RESTARTS, "a") as stream:
                print(f"{time.time():.0f}", file=stream)
            self.load_weights(**json.loads((Path(weights_dir) / CURRENT).read_text()))

    # -- what callers use --------------------------------------------------------------------------------------------

    def generate(
        self, requests: list[dict[str, Any]], sampling: Sampling, self_critic: SelfCritic | None = None
    ) -> list[dict[str, Any]]:
        """Continue each request (`prompt_ids`, `prefix_ids`, `n`, `max_new_tokens`, `seed`) `n` times; blocks until all are done.

        With `self_critic`, the states of requests that `ask_value` and the ends of those that are a `chunk` are scored in the same
        batches of the engine, an end as soon as its group is there. Returns per request the columns of the schema's generate
        stage and `policy_version`.
        """
        groups = {self._request(request, sampling): i for i, request in enumerate(requests)}
        states = [
            self._ask(self_critic, request, []) if self_critic and request["ask_value"] else NOT_ASKED for request in requests
        ]
        completions: list[dict[str, Any]] = [{}] * len(requests)
        ends: list[list[Question]] = [[]] * len(requests)
        for future in as_completed(groups):
            i = groups[future]
            completions[i] = self._completion(requests[i], future.result())
            ends[i] = self._ask_ends(self_critic, requests[i], completions[i])
        for completion, state, questions in zip(completions, states, ends, strict=True):
            completion["prefix_value"] = self._value(state)
            completion["endpoint_value"] = [self._value(question) for question in questions]
            completion["reference_left_out"] = any(question.reference_left_out for question in (state, *questions))
        return completions

    def values(self, states: list[dict[str, Any]], self_critic: SelfCritic) -> list[float | None]:
        """The self-critic's value of each state (`prompt_ids`, `prefix_ids`, `reference_ids`); None where it answered with none."""
        questions = [self._ask(self_critic, state, []) for state in states]
        return [self._value(question) for question in questions]

    def self_critic_seconds(self) -> float:
        """Time spent on the self-critic's questions so far: of every engine step the share that they have in its batch."""
        return self._question_seconds

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

    def _call(self, action: Callable[[], Any], later: Future[Any] | None = None) -> Future[Any]:
        """Run `action` in the engine's thread, the only one that may touch the engine.

        Its result, or only its error where somebody else will set the result of the future `later`, is in the future returned.
        """
        future: Future[Any] = Future() if later is None else later

        def run() -> None:
            try:
                result = action()
                if later is None:
                    future.set_result(result)
            except BaseException as error:
                future.set_exception(error)

        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure}") from self._failure
        self._inbox.put(run)
        return future

    def _request(self, request: dict[str, Any], sampling: Sampling) -> Future[Any]:
        """Submit a state to continue; the output arrives in the future."""
        ids = [*request["prompt_ids"], *request["prefix_ids"]]
        return self._submit(
            ids,
            n=request["n"],
            max_tokens=request["max_new_tokens"],
            seed=request["seed"] % SEED_RANGE,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,
            flat_logprobs=True,
        )

    def _ask(self, self_critic: SelfCritic, request: dict[str, Any], response: list[int]) -> Question:
        """Submit the question for the value of a state."""
        context, left_out = self_critic.context(request, response)
        if context is None:
            return Question(None, left_out)
        return Question(self._submit(context, is_question=True, max_tokens=MAX_ANSWER_TOKENS, temperature=0.0), left_out)

    def _ask_ends(self, self_critic: SelfCritic | None, request: dict[str, Any], completion: dict[str, Any]) -> list[Question]:
        """Find the endpoints that are the self-critic's, and submit the questions for them."""
        ends = zip(completion["response_text"], completion["finish_reason"], strict=True)
        completion["self_scored"] = [self_critic is not None and self_critic.scores(request, *end) for end in ends]
        return [
            self._ask(self_critic, request, ids) if self_critic and own else NOT_ASKED
            for ids, own in zip(completion["response_ids"], completion["self_scored"], strict=True)
        ]

    def _value(self, question: Question) -> float | None:
        if question.answer is None:
            return None
        (answer,) = question.answer.result().outputs
        return parse_value(str(self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)))

    def _submit(self, ids: list[int], is_question: bool = False, **sampling: Any) -> Future[Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            detokenize=False, stop_token_ids=self._stop_ids, output_kind=RequestOutputKind.FINAL_ONLY, **sampling
        )
        name, future = f"{QUESTION if is_question else ''}{next(self._ids)}", Future[Any]()

        def add() -> None:
            self._llm.add_request(name, TokensPrompt(prompt_token_ids=ids), params)
            self._waiting[name] = future
            self._load[is_question] += params.n

        self._call(add, future)
        return future

    def _finished(self, output: Any) -> None:
        self._load[output.request_id.startswith(QUESTION)] -= len(output.outputs)
        self._waiting.pop(output.request_id).set_result(output)

    def _run(self) -> None:
        try:
            while True:
                while not self._llm.has_unfinished_requests() or not self._inbox.empty():
                    self._inbox.get()()
                share, began = self._load[True] / max(sum(self._load.values()), 1), time.perf_counter()
                for output in self._llm.step():
                    if output.finished and output.request_id in self._waiting:
                        self._finished(output)
                self._question_seconds += share * (time.perf_counter() - began)
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
        self._load = {False: 0, True: 0}

    def _completion(self, request: dict[str, Any], output: Any) -> dict[str, Any]:
        completions = sorted(output.outputs, key=lambda one: one.index)
        ids = [np.asarray(one.token_ids, np.int32) for one in completions]
        return {
            "response_ids": ids,
            "response_text": self._tokenizer.batch_decode(
                [[*request["prefix_ids"], *one] for one in ids], skip_special_tokens=True
            ),
            "rollout_logprobs": [np.asarray(one.logprobs.logprobs, np.float32) for one in completions],
            "finish_reason": [one.finish_reason for one in completions],
            # Decided here and nowhere else: cut off where the response budget ends, and not where a chunk does.
            "truncated": [one.finish_reason == "length" and not request["chunk"] for one in completions],
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
