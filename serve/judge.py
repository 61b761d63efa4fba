"""The judge: a Ray Serve application that scores responses, by handle for the pipeline and over HTTP for people.

`JUDGE_TOKEN=SECRET serve run serve.judge:app` starts it alone; `POST /score`, `GET /healthz`, and the OpenAPI page at `/docs`.
"""

import asyncio
import dataclasses
import math
import os
import secrets
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from ray import serve

from serve import typed_json
from serve.body_limit import BodyLimit
from serve.model_judge.judge import ModelJudge, Usage
from serve.pool import SandboxPool
from serve.reward_function import RewardFunction, Scored
from serve.sandbox import START_TIMEOUT_S
from serve.scoring import Scoring
from serve.verifiers import find

APP_NAME, DEPLOYMENT, TOKEN_FILE, CACHE = "judge", "Judge", "judge_token", "judge_cache"
BODY_BYTES = 1 << 20
LARGEST, ROUNDING = 1e30, 1e-6  # what float32 holds with room to square it; a sum of parts may miss its bound by this
CONF = Path(__file__).parents[1] / "conf/cluster/base.yaml"

api = FastAPI(title="Judge", description="Scores responses. A reward of null means that no score could be made; status says why.")
api.add_middleware(BodyLimit, most=BODY_BYTES)


@dataclass(frozen=True)
class JudgeConfig:
    """Size and patience of the judge; `conf/cluster/base.yaml` says what each key is."""

    BOUNDS: ClassVar[dict[str, tuple[float, float]]] = {
        "min_replicas": (1, math.inf),
        "max_replicas": (1, math.inf),
        "num_cpus": (0, math.inf),
        "max_ongoing_requests": (1, math.inf),
        "sandboxes": (1, math.inf),
        "verifier_timeout_s": (1e-3, 1e7),
        "verifier_memory_gib": (0.1, math.inf),
        "request_timeout_s": (1e-3, 1e7),
        "retries": (0, math.inf),
        "http_port": (1, 65535),
    }

    min_replicas: int
    max_replicas: int
    num_cpus: float
    max_ongoing_requests: int
    sandboxes: int
    verifier_timeout_s: float
    verifier_memory_gib: float
    request_timeout_s: float
    retries: int
    http_port: int
    http_token: bool

    def __post_init__(self) -> None:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"cluster.judge.min_replicas={self.min_replicas}: more than max_replicas={self.max_replicas}.")


class Item(BaseModel):
    """One response to score."""

    data_source: str = Field(examples=["chain_arithmetic"])
    response: str = Field(examples=["37+5=42;42-9=33;#33"])
    ground_truth: Any = Field(examples=["33"])
    extra_info: dict[str, Any] = {}


class Verdict(BaseModel):
    """Its reward and how right it is (`acc`), or null with the reason in `status`."""

    reward: float | None
    acc: float | None
    status: str


# Defined before the class: Serve takes a copy of it, with what it knows at that moment.
def _verdict(score: Scored, bounds: tuple[float, float] | None) -> dict[str, Any]:
    """A finite number within the task's range is a reward; anything else is null with its reason.

    A function that says nothing of how right a response is has its reward taken for that.
    """
    if isinstance(score, str):
        return {"reward": None, "acc": None, "status": score}
    reward, acc = score if isinstance(score, tuple) else (score, score)
    if not (math.isfinite(reward) and math.isfinite(acc)):
        return {"reward": None, "acc": None, "status": f"error: the verifier returned {reward if math.isfinite(acc) else acc}"}
    low, high = bounds or (-LARGEST, LARGEST)
    if not low - ROUNDING <= reward <= high + ROUNDING:
        status = f"error: a reward of {reward:g} is outside task.reward_range=[{low:g}, {high:g}]"
        return {"reward": None, "acc": None, "status": status}
    return {"reward": reward, "acc": acc, "status": "ok"}


def _of_verifier(right: Scored, bounds: tuple[float, float] | None) -> dict[str, Any]:
    """The verdict of a verifier, which says from 0 to 1 how right a response is: the task's range says what that is worth."""
    if isinstance(right, float) and 0 <= right <= 1 and bounds is not None:
        low, high = bounds
        return _verdict((low + (high - low) * right, right), bounds)
    return _verdict(right, bounds)


def _in_process(item: dict[str, Any]) -> float:
    """The score of a verifier that is quick and runs no foreign code."""
    return find(item["data_source"]).score(item)


def _bearer(request: Request) -> bytes:
    return request.headers.get("authorization", "").removeprefix("Bearer ").encode()


@serve.ingress(api)
class JudgeReplica:
    """Scores batches; no failure of a verifier ever becomes a reward of 0.

    Training and people have sandboxes of their own, so that nothing that comes over HTTP can hold up a batch.
    """

    def __init__(
        self,
        config: JudgeConfig,
        scoring: Scoring | None = None,
        token: str | None = None,
        cache: Path | None = None,
    ) -> None:
        scoring = scoring or Scoring()
        self._config, self._token, self._reward, self._bounds = config, token, scoring.reward, scoring.bounds
        self._answer = dataclasses.asdict(scoring.answer)
        self._models = {name: ModelJudge(one, cache or Path(CACHE)) for name, one in scoring.model_judges.items()}
        isolated = self._reward is None or self._reward.isolated
        size = (config.verifier_timeout_s, config.verifier_memory_gib, isolated)
        self._training, self._people = SandboxPool(config.sandboxes, *size), SandboxPool(1, *size)

    async def score_batch(self, items: list[dict[str, Any]], deadline_s: float | None = None) -> list[dict[str, Any]]:
        """Verdicts in the order of the items (the fields of `Item`, and `validation` for those of an evaluation).

        What has no verdict by the deadline is null with "timeout"; what is done by then is kept. The first verdict also has the
        `usage` of language models.
        """
        usage = Usage()
        verdicts = await self._judge(self._training, items, deadline_s or self._config.request_timeout_s, usage)
        if usage != Usage():
            verdicts[0]["usage"] = usage.metrics()
        return verdicts

    async def isolation(self) -> list[str]:
        """What this machine cannot keep from a scorer."""
        return await self._training.missing(self._reward)

    @api.post("/score")
    async def score(self, item: Item, request: Request) -> Verdict:
        """Score one response."""
        if self._token is not None and not secrets.compare_digest(_bearer(request), self._token.encode()):
            raise HTTPException(401, "this judge wants the run's token: Authorization: Bearer TOKEN")
        one = typed_json.restored(item.model_dump())
        (verdict,) = await self._judge(self._people, [one], self._config.request_timeout_s, Usage())
        return Verdict(**verdict)

    @api.get("/healthz")
    async def healthz(self) -> dict[str, str]:
        """Whether the judge is up."""
        return {"status": "ok"}

    async def _judge(self, pool: SandboxPool, items: list[dict[str, Any]], deadline_s: float, usage: Usage) -> list[dict[str, Any]]:
        if self._reward is None:
            items = [item | {"answer": self._answer} for item in items]
        verdicts: dict[int, dict[str, Any]] = {}
        jobs: list[tuple[list[int], str | RewardFunction]] = []
        asked: list[int] = []
        if self._reward is not None:
            jobs = [(batch, self._reward) for batch in self._reward.batches(items)]
        else:
            for i, item in enumerate(items):
                try:
                    verifier = find(item["data_source"])
                    if verifier.asks_model:
                        asked.append(i)
                    elif verifier.killable:
                        jobs.append(([i], item["data_source"]))
                    else:
                        verdicts[i] = _of_verifier(_in_process(item), self._bounds)
                except Exception as error:
                    verdicts[i] = _verdict(f"error: {type(error).__name__}: {error}"[:500], None)
        scored, graded = await asyncio.gather(
            pool.score([(scorer, [items[i] for i in batch]) for batch, scorer in jobs], deadline_s),
            self._grades([items[i] for i in asked], deadline_s, usage),
        )
        verdicts |= {i: _of_verifier(grade, self._bounds) for i, grade in zip(asked, graded, strict=True)}
        read = _of_verifier if self._reward is None else _verdict
        for (batch, _), scores in zip(jobs, scored, strict=True):
            verdicts |= {i: read(score, self._bounds) for i, score in zip(batch, scores, strict=True)}
        return [verdicts[i] for i in range(len(items))]

    async def _grades(self, items: list[dict[str, Any]], deadline_s: float, usage: Usage) -> list[Scored]:
        """What the language models say; those that have not answered by the deadline are a timeout, and their answers are kept."""
        tasks = [asyncio.create_task(self._grade(item, usage)) for item in items]
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s)
        late = f"timeout: the model judge gave no answer within {deadline_s:g} s"
        grades = [task.result() if task.done() else late for task in tasks]
        for task in tasks:
            task.cancel()
        return grades

    async def _grade(self, item: dict[str, Any], usage: Usage) -> Scored:
        model = self._models.get("validation" if item.get("validation") else "train")
        if model is None:
            return "error: no task.model_judge, which proofs are graded by"
        try:
            return await model.score(item, usage)
        except Exception as error:
            return f"error: model judge: {type(error).__name__}: {error}"[:500]

    def __del__(self) -> None:
        self._training.close()
        self._people.close()


Judge: serve.Deployment = serve.deployment(name=DEPLOYMENT)(JudgeReplica)


def application(
    config: JudgeConfig, scoring: Scoring | None = None, token: str | None = None, cache: Path | None = None
) -> serve.Application:
    """The judge sized by a configuration; HTTP wants the token, and answers of language models are kept in the folder `cache`."""
    return Judge.options(
        autoscaling_config={"min_replicas": config.min_replicas, "max_replicas": config.max_replicas},
        max_ongoing_requests=config.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.num_cpus},
    ).bind(config, scoring, token, cache)


def start(config: JudgeConfig, scoring: Scoring, folder: str | Path) -> None:
    """Run the judge in the current Ray cluster, ready when this returns.

    The token of its HTTP side and the answers of language models go to `folder`.
    """
    serve.start(http_options={"host": "127.0.0.1", "port": config.http_port})
    token = new_token(folder) if config.http_token else None
    cache = Path(folder).resolve() / CACHE
    running = serve.run(application(config, scoring, token, cache), name=APP_NAME, route_prefix="/")
    if missing := running.isolation.remote().result(timeout_s=START_TIMEOUT_S):
        lacks = " and ".join(missing)
        print(f"warning: this machine cannot keep {lacks} from verifiers (no user namespaces or no Landlock)", file=sys.stderr)


def new_token(folder: str | Path) -> str:
    """A secret of this run, in a file that only its user can read."""
    token = secrets.token_urlsafe(32)
    file = Path(folder) / TOKEN_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(token)
    return token


@cache
def handle() -> serve.handle.DeploymentHandle:
    """The running judge's handle, from any process of the cluster; made once in each, as its router takes a while to start."""
    return serve.get_deployment_handle(DEPLOYMENT, app_name=APP_NAME)


def app(arguments: dict[str, str]) -> serve.Application:
    """For `serve run serve.judge:app`: the token is `JUDGE_TOKEN`, or `none` to answer anyone who reaches the port."""
    token = os.environ.get("JUDGE_TOKEN", "")
    if not token:
        raise ValueError("JUDGE_TOKEN is not set: give the secret that requests must bring, or JUDGE_TOKEN=none to ask for none.")
    sizes = yaml.safe_load(CONF.read_text())["judge"]
    return application(JudgeConfig(**sizes), token=None if token == "none" else token)
