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

from serve.sandbox import Sandbox, SandboxError, SandboxTimeout
from serve.verifiers import find

APP_NAME, DEPLOYMENT = "judge", "Judge"

api = FastAPI(title="Judge", description="Scores responses. A reward of null means that no score could be made; status says why.")


@dataclass(frozen=True)
class JudgeConfig:
    """Size and patience of the judge."""

    min_replicas: int
    max_replicas: int
    num_cpus: float
    max_ongoing_requests: int
    sandboxes: int  # killable verifier processes per replica
    verifier_timeout_s: float  # wall clock of one verification
    request_timeout_s: float  # of one batch, as the pipeline sees it
    retries: int  # of a batch that failed as a whole
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


@serve.ingress(api)
class JudgeReplica:
    """Scores batches; no failure of a verifier ever becomes a reward of 0."""

    def __init__(self, sandboxes: int = 1, verifier_timeout_s: float = 10.0) -> None:
        self._sandboxes = [Sandbox(verifier_timeout_s) for _ in range(sandboxes)]
        self._turns = itertools.cycle(self._sandboxes)

    async def score_batch(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Verdicts in the order of the items (the fields of `Item`, `extra_info` as a mapping or as JSON)."""
        return list(await asyncio.gather(*(self._verdict(item) for item in items)))

    @api.post("/score")
    async def score(self, item: Item) -> Verdict:
        """Score one response."""
        return Verdict(**await self._verdict(item.model_dump()))

    @api.get("/healthz")
    async def healthz(self) -> dict[str, str]:
        """Whether the judge is up."""
        return {"status": "ok"}

    async def _verdict(self, item: dict[str, Any]) -> dict[str, Any]:
        try:
            extra = item["extra_info"]
            arguments = (item["response"], item["ground_truth"], json.loads(extra) if isinstance(extra, str) else extra)
            verifier = find(item["data_source"])
            if verifier.killable:
                reward = await asyncio.to_thread(next(self._turns).score, item["data_source"], *arguments)
            else:
                reward = verifier.load()(*arguments)
        except SandboxTimeout as error:
            return {"reward": None, "status": f"timeout: {error}"}
        except SandboxError as error:
            return {"reward": None, "status": f"error: {error}"}
        except Exception as error:
            return {"reward": None, "status": f"error: {type(error).__name__}: {error}"[:500]}
        if not math.isfinite(reward):
            return {"reward": None, "status": f"error: the verifier returned {reward}"}
        return {"reward": reward, "status": "ok"}

    def __del__(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()


Judge: serve.Deployment = serve.deployment(name=DEPLOYMENT)(JudgeReplica)


def application(config: JudgeConfig) -> serve.Application:
    """The judge sized by a configuration."""
    return Judge.options(
        autoscaling_config={"min_replicas": config.min_replicas, "max_replicas": config.max_replicas},
        max_ongoing_requests=config.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.num_cpus},
    ).bind(config.sandboxes, config.verifier_timeout_s)


def start(config: JudgeConfig) -> serve.handle.DeploymentHandle:
    """Run the judge in the current Ray cluster and return its handle once it answers."""
    serve.start(http_options={"host": "127.0.0.1", "port": config.http_port})
    return serve.run(application(config), name=APP_NAME, route_prefix="/")


@cache
def handle() -> serve.handle.DeploymentHandle:
    """The running judge's handle, from any process of the cluster; made once in each, as its router takes a while to start."""
    return serve.get_deployment_handle(DEPLOYMENT, app_name=APP_NAME)


app = Judge.bind()
