"""The judge: a Ray Serve application that scores responses, by handle for the pipeline and over HTTP for people.

`serve run serve.judge:app` starts it alone; `POST /score`, `GET /healthz`, and the OpenAPI page at `/docs`.
"""

import asyncio
import itertools
import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field
from ray import serve

from serve.reward_function import RewardFunction
from serve.sandbox import Sandbox
from serve.verifiers import find

APP_NAME, DEPLOYMENT = "judge", "Judge"

api = FastAPI(title="Judge", description="Scores responses. A reward of null means that no score could be made; status says why.")


@dataclass(frozen=True)
class JudgeConfig:
    """Size and patience of the judge; `conf/cluster/base.yaml` says what each key is."""

    min_replicas: int
    max_replicas: int
    num_cpus: float
    max_ongoing_requests: int
    sandboxes: int
    verifier_timeout_s: float
    request_timeout_s: float
    retries: int
    http_port: int


class Item(BaseModel):
    """One response to score."""

    data_source: str = Field(examples=["chain_arithmetic"])
    response: str = Field(examples=["37+5=42;42-9=33;#33"])
    ground_truth: str = Field(examples=["33"])
    extra_info: dict[str, Any] = {}


class Verdict(BaseModel):
    """Its reward, or null with the reason in `status`."""

    reward: float | None
    status: str


# Defined before the class: Serve takes a copy of it, with what it knows at that moment.
def _mapping(extra: str | dict[str, Any]) -> dict[str, Any]:
    return json.loads(extra) if isinstance(extra, str) else extra


def _verdict(score: float | str) -> dict[str, Any]:
    """A finite number is a reward; anything else is null with its reason."""
    if isinstance(score, str):
        return {"reward": None, "status": score}
    if not math.isfinite(score):
        return {"reward": None, "status": f"error: the verifier returned {score}"}
    return {"reward": score, "status": "ok"}


@serve.ingress(api)
class JudgeReplica:
    """Scores batches; no failure of a verifier ever becomes a reward of 0."""

    def __init__(self, sandboxes: int = 1, verifier_timeout_s: float = 10.0, reward: RewardFunction | None = None) -> None:
        self._sandboxes = [Sandbox(verifier_timeout_s) for _ in range(sandboxes)]
        self._turns = itertools.cycle(self._sandboxes)
        self._reward = reward  # a user's own function, instead of the verifiers

    async def score_batch(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Verdicts in the order of the items (the fields of `Item`, `extra_info` as a mapping or as JSON)."""
        items = [item | {"extra_info": _mapping(item["extra_info"])} for item in items]
        if self._reward is None:
            return list(await asyncio.gather(*(self._verify(item) for item in items)))
        batches = self._reward.batches(items)
        scored = await asyncio.gather(*(self._sandboxed(self._reward, [items[i] for i in batch]) for batch in batches))
        verdicts = {
            i: verdict for batch, scores in zip(batches, scored, strict=True) for i, verdict in zip(batch, scores, strict=True)
        }
        return [verdicts[i] for i in range(len(items))]

    @api.post("/score")
    async def score(self, item: Item) -> Verdict:
        """Score one response."""
        (verdict,) = await self.score_batch([item.model_dump()])
        return Verdict(**verdict)

    @api.get("/healthz")
    async def healthz(self) -> dict[str, str]:
        """Whether the judge is up."""
        return {"status": "ok"}

    async def _verify(self, item: dict[str, Any]) -> dict[str, Any]:
        try:
            verifier = find(item["data_source"])
            if verifier.killable:
                return (await self._sandboxed(item["data_source"], [item]))[0]
            return _verdict(float(verifier.load()(item["response"], item["ground_truth"], item["extra_info"])))
        except Exception as error:
            return _verdict(f"error: {type(error).__name__}: {error}"[:500])

    async def _sandboxed(self, scorer: str | RewardFunction, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        scores = await asyncio.to_thread(next(self._turns).score, scorer, items)
        return [_verdict(score) for score in scores]

    def __del__(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()


Judge: serve.Deployment = serve.deployment(name=DEPLOYMENT)(JudgeReplica)


def application(config: JudgeConfig, reward: RewardFunction | None = None) -> serve.Application:
    """The judge sized by a configuration, with a reward function of the user's own if there is one."""
    return Judge.options(
        autoscaling_config={"min_replicas": config.min_replicas, "max_replicas": config.max_replicas},
        max_ongoing_requests=config.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.num_cpus},
    ).bind(config.sandboxes, config.verifier_timeout_s, reward)


def start(config: JudgeConfig, reward: RewardFunction | None = None) -> serve.handle.DeploymentHandle:
    """Run the judge in the current Ray cluster and return its handle once it answers."""
    serve.start(http_options={"host": "127.0.0.1", "port": config.http_port})
    return serve.run(application(config, reward), name=APP_NAME, route_prefix="/")


@cache
def handle() -> serve.handle.DeploymentHandle:
    """The running judge's handle, from any process of the cluster; made once in each, as its router takes a while to start."""
    return serve.get_deployment_handle(DEPLOYMENT, app_name=APP_NAME)


app = Judge.bind()
