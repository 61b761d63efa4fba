"""Every number of a configuration has bounds, and what lies beyond them is one sentence before anything starts."""

import dataclasses
import math
import re
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.ac2 import AC2
from algorithms.grpo import GRPO
from algorithms.ppo import PPO
from pipelines.config.make import ConfigError, bounds_of, check_bounds, make
from pipelines.config.run import RunConfig
from pipelines.replay import ReplayJob
from tests.conftest import configure


def parts(hint) -> list:
    """A type and all that it is made of."""
    return [hint, *(part for one in typing.get_args(hint) for part in parts(one))]


def kinds() -> list[type]:
    """Every dataclass that a configuration fills."""
    found: list[type] = []

    def walk(kind: type) -> None:
        if kind in found:
            return
        found.append(kind)
        for hint in typing.get_type_hints(kind).values():
            for part in parts(hint):
                if dataclasses.is_dataclass(part):
                    walk(part)

    for kind in (RunConfig, AC2, PPO, GRPO):
        walk(kind)
    return found


NUMBERS = [
    (kind, field.name)
    for kind in [*kinds(), ReplayJob]
    for field in dataclasses.fields(kind)
    if {int, float} & set(parts(typing.get_type_hints(kind)[field.name]))
    and not (kind is ReplayJob and field.name not in vars(ReplayJob)["BOUNDS"])
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_every_number_has_bounds(kind, name):
    low, high = bounds_of(kind)[name]
    assert low <= high
    where = f"somewhere.{name}"
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError, match=f"{where}=.*must be a finite number"):
            check_bounds(kind, name, value, where)
    if math.isfinite(low):
        with pytest.raises(ConfigError, match=f"{where}=.*must be (at least|above)"):
            check_bounds(kind, name, math.nextafter(low, -math.inf), where)
        check_bounds(kind, name, low, where)
    if math.isfinite(high):
        with pytest.raises(ConfigError, match=f"{where}=.*must be at most"):
            check_bounds(kind, name, [math.nextafter(high, math.inf)], where)
        check_bounds(kind, name, high, where)


@given(number=st.floats(), which=st.sampled_from(NUMBERS))
def test_a_number_passes_exactly_within_its_bounds(number, which):
    kind, name = which
    low, high = bounds_of(kind)[name]
    try:
        check_bounds(kind, name, number, name)
        passed = True
    except ConfigError:
        passed = False
    assert passed == (math.isfinite(number) and low <= number <= high)


REFUSED = {
    "steps=0": "steps=0: must be at least 1",
    "steps=-5": "steps=-5: must be at least 1",
    "steps=1.5": "steps=1.5: expected int",
    "seed=-1": "seed=-1: must be at least 0",
    "seed=null": "seed=None: expected int",
    "max_missing_reward=1.5": "max_missing_reward=1.5: must be at most 1",
    "logprob_diff_alarm=nan": "logprob_diff_alarm=nan: must be a finite number",
    "optimizer.lr=inf": "optimizer.lr=inf: must be a finite number",
    "optimizer.lr=-1e-4": "optimizer.lr=-0.0001: must be at least 0",
    "optimizer.clip_grad_norm=0": "optimizer.clip_grad_norm=0: must be above 0",
    "optimizer.betas=[0.9,1.0]": "optimizer.betas=1.0: must be at most",
    "checkpoint.keep_last=0": "checkpoint.keep_last=0: must be at least 1",
    "checkpoint.every=-1": "checkpoint.every=-1: must be at least 0",
    "evaluation.n=0": "evaluation.n=0: must be at least 1",
    "evaluation.temperature=-1": "evaluation.temperature=-1: must be at least 0",
    "sampling.temperature=nan": "sampling.temperature=nan: must be a finite number",
    "task.max_new_tokens=0": "max_new_tokens=0: must be at least 1",
    "task.train.count=0": "task.train.count=0: must be at least 1",
    "task.train.count=-1": "task.train.count=-1: must be at least 1",
    "task.reward_range=[0,high]": "reward_range=[0, 'high']: expected numbers",
    "task.reward_range=[0,nan]": "reward_range=nan: must be a finite number",
    "cluster.judge.http_port=0": "cluster.judge.http_port=0: must be at least 1",
    "cluster.judge.http_port=70000": "cluster.judge.http_port=70000: must be at most 65535",
    "cluster.judge.min_replicas=3": "cluster.judge.min_replicas=3: more than max_replicas=1",
    "cluster.engines.count=0": "cluster.engines.count=0: must be at least 1",
    "cluster.engines.count=true": "cluster.engines.count=True: expected int",
    "cluster.learner.ranks=-2": "cluster.learner.ranks=-2: must be at least 1",
    "cluster.rollout.blocks=0": "cluster.rollout.blocks=0: must be at least 1",
    "keep_rollouts=-1": "keep_rollouts=-1: must be at least 0",
    "algorithm.group_size=0": "algorithm.group_size=0: must be at least 1",
    "algorithm.problems_per_step=-3": "algorithm.problems_per_step=-3: must be at least 1",
    "algorithm.clip_low=inf": "algorithm.clip_low=inf: must be a finite number",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items(), ids=REFUSED.keys())
def test_a_command_line_is_refused_in_a_sentence(override, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        configure(override)
    assert "\n" not in str(caught.value)


def test_make_checks_what_it_fills():
    with pytest.raises(ConfigError, match=r"x\.keep_last=0: must be at least 1"):
        make(type(configure().checkpoint), {"every": 1, "keep_last": 0, "keep_best": 0}, "x")
