"""A user's own reward function, of verl's or TRL's signature, plain or async. It only ever runs in a sandbox process."""

import ast
import asyncio
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

SIGNATURES = ("verl", "trl")
ASYNC_CALLS = 64  # calls of an async function of verl's signature that wait at the same time


@dataclass(frozen=True)
class RewardConfig:
    """Where a run's own reward function is, if it has one; `conf/config.yaml` says what each key is."""

    path: str | None
    name: str | None
    signature: str
    isolated: bool = True

    def __post_init__(self) -> None:
        if self.signature not in SIGNATURES:
            raise ValueError(f"reward.signature={self.signature}: use one of {', '.join(SIGNATURES)}.")
        if (self.path is None) != (self.name is None):
            raise ValueError("reward.path and reward.name go together: give both or neither.")


@dataclass(frozen=True)
class RewardFunction:
    """The function's source, sent to where it runs; the file itself is needed only for what it imports beside it."""

    path: str
    source: str
    name: str
    signature: str
    is_async: bool = False
    isolated: bool = True

    @classmethod
    def read(cls, config: RewardConfig) -> "RewardFunction | None":
        """Read the file and look for the function without running either; ValueError in one sentence."""
        if config.path is None or config.name is None:
            return None
        file = Path(config.path)
        if not file.is_file():
            raise ValueError(f"reward.path={config.path}: no such file.")
        source = file.read_text()
        try:
            tree = ast.parse(source)
        except SyntaxError as error:
            raise ValueError(f"reward.path={config.path}, line {error.lineno}: {error.msg}.") from error
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        names += [t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)]
        names += [alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        if config.name not in names:
            near = get_close_matches(config.name, names, n=3, cutoff=0.4) or names
            raise ValueError(f"reward.name={config.name}: {config.path} has no such function; it has {', '.join(near) or 'none'}.")
        is_async = any(isinstance(node, ast.AsyncFunctionDef) and node.name == config.name for node in tree.body)
        return cls(str(file.resolve()), source, config.name, config.signature, is_async, config.isolated)

    def load(self) -> Callable[..., Any]:
        """Run the file and return the function."""
        import sys

        sys.path.insert(0, str(Path(self.path).parent))
        namespace: dict[str, Any] = {"__name__": "reward_function", "__file__": self.path}
        exec(compile(self.source, self.path, "exec"), namespace)
        return namespace[self.name]

    def batches(self, items: list[dict[str, Any]]) -> list[list[int]]:
        """Which items are scored together: TRL's signature takes a prompt's continuations, verl's one item, or many if async."""
        if self.signature == "verl":
            size = ASYNC_CALLS if self.is_async else 1
            return [list(range(i, min(i + size, len(items)))) for i in range(0, len(items), size)]
        groups: dict[Any, list[int]] = {}
        for i, item in enumerate(items):
            groups.setdefault(item.get("row_id", i), []).append(i)
        return list(groups.values())


# A reward; with it the function's own verdict of how right the response is; or the reason why there is none.
Scored = float | tuple[float, float] | str


def call(function: Callable[..., Any], signature: str, items: list[dict[str, Any]], timeout_s: float) -> list[Scored]:
    """Rewards of the items, or for each the reason why it has none: whatever is no finite number is no reward."""
    if signature == "verl":
        results = [_verl_call(function, item) for item in items]
        if inspect.isawaitable(results[0]):
            results = asyncio.run(_gather(results, timeout_s))
        return [_scored(result) for result in results]
    result = function(**_trl_arguments(function, items))
    if inspect.isawaitable(result):
        (result,) = asyncio.run(_gather([result], timeout_s))
        if isinstance(result, Exception):
            raise result
    if not isinstance(result, list | tuple) or len(result) != len(items):
        size = f"{len(result)} rewards" if isinstance(result, list | tuple) else type(result).__name__
        return [f"the reward function returned {size} for {len(items)} completions"] * len(items)
    return [_reward(value) for value in result]


async def _gather(calls: list[Any], timeout_s: float) -> list[Any]:
    """Results in order; what raised or took too long is its exception."""
    return await asyncio.gather(*(asyncio.wait_for(one, timeout_s) for one in calls), return_exceptions=True)


def _verl_call(function: Callable[..., Any], item: dict[str, Any]) -> Any:
    return function(
        data_source=item["data_source"],
        solution_str=item["response"],
        ground_truth=item["ground_truth"],
        extra_info=item["extra_info"],
    )


def _trl_arguments(function: Callable[..., Any], items: list[dict[str, Any]]) -> dict[str, Any]:
    """TRL's keywords, those of them that the function takes, and every other column as a list."""
    prompts = [item["extra_info"].get("prompt", "") for item in items]
    texts = [item["response"] for item in items]
    messages = bool(prompts) and isinstance(prompts[0], list)
    names = {name for item in items for name in item["extra_info"] if name != "prompt"}
    offered: dict[str, Any] = {
        "prompts": prompts,
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if messages else texts,
        "completion_ids": [item.get("response_ids", []) for item in items],
        "trainer_state": None,
        "log_extra": _ignore,
        "log_metric": _ignore,
        "ground_truth": [item["ground_truth"] for item in items],
        **{name: [item["extra_info"].get(name) for item in items] for name in names},
    }
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    return {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}


def _ignore(*_: Any, **__: Any) -> None:
    """TRL lets reward functions log; what they log has no place here yet."""


def _scored(result: Any) -> Scored:
    """What a function of verl's signature returned: a number, or a mapping with `score` and perhaps `acc`."""
    if not isinstance(result, dict) or "score" not in result:
        return _reward(result)
    reward, acc = _reward(result["score"]), result.get("acc")
    if isinstance(reward, str) or acc is None:
        return reward
    right = _reward(acc)
    return (reward, right) if isinstance(right, float) else f"{right} (acc)"


def _reward(value: Any) -> float | str:
    if isinstance(value, BaseException):
        return f"the reward function {'took too long' if isinstance(value, TimeoutError) else f'raised {value!r:.300}'}"
    if value is None:
        return "the reward function abstained (None)"
    if not isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()  # numpy and torch scalars
    if not isinstance(value, numbers.Real):
        return f"the reward function returned {value!r:.80}, which is no number"
    return float(value) if math.isfinite(value) else f"the reward function returned {float(value)}"
