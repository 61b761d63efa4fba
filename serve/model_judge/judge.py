"""Asks a language model for points, through the `openai` client: many at a time, each question once, no 0 that it did not give."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from serve.model_judge.cache import AnswerCache
from serve.model_judge.config import ModelJudgeConfig
from serve.model_judge.prompt import JudgePrompt, texts_of
from serve.reward_function import Scored

NOTHING_TO_JUDGE = (0.0, 0.0)
MILLION = 1e6


@dataclass(frozen=True)
class Secret:
    """A key that is not printed with the object that holds it."""

    value: str

    def __repr__(self) -> str:
        return "Secret(...)"


@dataclass
class Usage:
    """What answers took; those from the cache took nothing."""

    asked: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    def metrics(self) -> dict[str, float]:
        """By the names that runs log."""
        return {
            "judge/asked": self.asked,
            "judge/cached": self.cached,
            "judge/prompt_tokens": self.prompt_tokens,
            "judge/completion_tokens": self.completion_tokens,
            "judge/cost_usd": self.cost_usd,
        }


def key_of(config: ModelJudgeConfig) -> Secret:
    """The key in the environment; ValueError if it is not there."""
    if config.api_key_env is None:
        return Secret("none")
    if not (key := os.environ.get(config.api_key_env)):
        raise ValueError(
            f"task.model_judge: the environment has no {config.api_key_env}, which is to hold the key for {config.base_url}; set "
            "it, or api_key_env=null if the endpoint wants none."
        )
    return Secret(key)


@dataclass(frozen=True)
class PreparedJudge:
    """A judge with its prompt and its key, which the machine that asks need not have."""

    config: ModelJudgeConfig
    prompt: JudgePrompt
    key: Secret

    @classmethod
    def read(cls, config: ModelJudgeConfig) -> "PreparedJudge":
        """ValueError in one sentence if there is no such prompt or no key."""
        return cls(config, JudgePrompt.read(config.prompt), key_of(config))

    def client_arguments(self) -> dict[str, Any]:
        """What the `openai` client is made with; it retries with backoff and jitter, as an endpoint's Retry-After says."""
        config = self.config
        return {
            "base_url": config.base_url,
            "api_key": self.key.value,
            "timeout": config.timeout_s,
            "max_retries": config.retries,
        }


class ModelJudge:
    """Grades responses; identical questions in work are asked once, and answers are kept."""

    def __init__(self, prepared: PreparedJudge, cache: Path) -> None:
        self.config, self.prompt = prepared.config, prepared.prompt
        self._client = openai.AsyncOpenAI(**prepared.client_arguments())
        self._cache = AnswerCache(cache)
        self._turns = asyncio.Semaphore(self.config.concurrency)
        self._asking: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def score(self, item: dict[str, Any], usage: Usage) -> Scored:
        """How many of the points a response gets, from 0 to 1, or the reason why that is not known."""
        if len(item["response"]) > self.config.max_response_chars:
            return f"error: model judge: a response of {len(item['response'])} characters; max_response_chars is less"
        answer = self.prompt.answer_in(item["response"])
        if answer is None:
            return NOTHING_TO_JUDGE
        if (lacking := self.prompt.lacks(item["ground_truth"], item["extra_info"])) is not None:
            return f"error: model judge: the row has no {lacking}"
        question = self._question(texts_of(item["ground_truth"], item["extra_info"]) | {"response": answer})
        try:
            reply = await self._answer(question, usage)
            right = self.prompt.read_answer(reply)
        except ValueError as error:
            return f"error: model judge: {error}"
        except openai.OpenAIError as error:
            return f"error: model judge: {type(error).__name__}: {_first_line(error)}"
        return right, right

    async def close(self) -> None:
        """End the client's connections."""
        await self._client.close()

    def _question(self, texts: dict[str, str]) -> dict[str, Any]:
        config = self.config
        sampling = {"max_completion_tokens": config.max_tokens, "temperature": config.temperature}
        return {"model": config.model, "messages": self.prompt.messages(texts), **sampling, "extra_body": config.extra_body}

    async def _answer(self, question: dict[str, Any], usage: Usage) -> str:
        """The reply's text. A question goes on when its caller has given up, so that what is paid for is kept."""
        key = AnswerCache.key(question)
        if (known := await asyncio.to_thread(self._cache.get, key)) is not None:
            usage.cached += 1
            return _text(known)
        if shared := self._asking.get(key):
            usage.cached += 1
            return _text(await asyncio.shield(shared))
        task = self._asking[key] = asyncio.create_task(self._ask(key, question))
        task.add_done_callback(lambda _: self._asking.pop(key, None))
        reply = await asyncio.shield(task)
        usage.asked += 1
        usage.prompt_tokens += reply["prompt_tokens"]
        usage.completion_tokens += reply["completion_tokens"]
        price_in, price_out = self.config.prices
        usage.cost_usd += (reply["prompt_tokens"] * price_in + reply["completion_tokens"] * price_out) / MILLION
        return _text(reply)

    async def _ask(self, key: str, question: dict[str, Any]) -> dict[str, Any]:
        async with self._turns:
            made = await self._client.chat.completions.create(**question)
        if not made.choices:
            raise ValueError("the endpoint's answer has no choices")
        choice, spent = made.choices[0], made.usage
        reply = {
            "text": choice.message.content or "",
            "finish_reason": choice.finish_reason,
            "prompt_tokens": spent.prompt_tokens if spent else 0,
            "completion_tokens": spent.completion_tokens if spent else 0,
        }
        await asyncio.to_thread(self._cache.put, key, reply)
        return reply


def _text(reply: dict[str, Any]) -> str:
    if reply["finish_reason"] == "length":
        raise ValueError("its answer was cut off; raise max_tokens")
    return reply["text"]


def check_reachable(prepared: PreparedJudge) -> None:
    """One short question, before anything is started for its answers; ValueError in one sentence if the endpoint refuses it."""
    config = prepared.config
    client = openai.OpenAI(**prepared.client_arguments() | {"timeout": min(config.timeout_s, 60.0), "max_retries": 2})
    try:
        client.chat.completions.create(
            model=config.model,
            messages=[{"role": "user", "content": "Answer with <points>0</points>."}],
            max_completion_tokens=16,
            extra_body=config.extra_body,
        )
    except openai.RateLimitError:
        return  # it is there, and busy: runs wait for it
    except openai.OpenAIError as error:
        raise ValueError(
            f"task.model_judge: {config.model} at {config.base_url} cannot be asked ({type(error).__name__}: {_first_line(error)})."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
