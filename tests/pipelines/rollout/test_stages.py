"""Stages without a cluster: what each adds to a table and what it refuses."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from algorithms.grpo import GRPO
from algorithms.types import Bools, Credit, Problem, PromptRow
from pipelines.engines.config import Sampling
from pipelines.rollout import schema
from pipelines.rollout.metrics import observed_groups
from pipelines.rollout.plan import plan_table
from pipelines.rollout.stages import credit, generate, judge_rows
from pipelines.trainer.batching import samples_of, trainer_rows
from tests.conftest import configure

SAMPLING = {"train": Sampling(1.0), "eval": Sampling(0.6, 0.95, 20)}


class Engines:
    """Answers every row with fixed tokens and remembers the sampling it was asked for."""

    def generate(self, rows, sampling, critic):
        self.sampling = sampling
        return [
            {
                "response_ids": [[5, 6]] * row["n"],
                "response_text": ["ab"] * row["n"],
                "rollout_logprobs": [[-0.1, -0.2]] * row["n"],
                "finish_reason": ["stop"] * row["n"],
                "truncated": [False] * row["n"],
                "self_scored": [False] * row["n"],
                "endpoint_value": [None] * row["n"],
                "prefix_value": None,
                "reference_left_out": False,
            }
            for row in rows
        ]


def planned(purpose="train", count=2):
    problem = Problem("p", "chain_arithmetic", [1, 2], "33")
    return plan_table([PromptRow(problem, 2, 10, purpose=purpose)] * count, 1, 0, 0, 0)


def judged(table):
    rewards = {
        "reward": [[1.0, 0.0]] * table.num_rows,
        "acc": [[1.0, 0.0]] * table.num_rows,
        "reward_status": [["ok", "ok"]] * table.num_rows,
    }
    return schema.append(table, rewards, "judge")


def test_evaluation_has_its_own_sampling():
    engines = Engines()
    for purpose in ("train", "eval"):
        generate(planned(purpose), engines, SAMPLING)
        assert engines.sampling == SAMPLING[purpose]
    mixed = pa.concat_tables([planned("train"), planned("eval")])
    with pytest.raises(schema.SchemaError, match="mixes"):
        generate(mixed, engines, SAMPLING)


def test_empty_blocks_pass_through_every_stage():
    table = generate(planned(count=0), Engines(), SAMPLING)
    table = judge_rows(table, configure().judge)
    assert credit(table, configure().algorithm).schema.equals(schema.credited(Credit))


def test_credit_adds_advantages_and_leaves_evaluation_rows_without():
    train = credit(judged(generate(planned(), Engines(), SAMPLING)), configure().algorithm)
    assert train["advantages"].to_pylist() == [[0.5, -0.5]] * 2
    assert train["keep"].to_pylist() == [True, True]
    evaluated = credit(judged(generate(planned("eval"), Engines(), SAMPLING)), configure().algorithm)
    assert evaluated["keep"].to_pylist() == [False, False]
    assert evaluated["actor_mask"].to_pylist() == [[False, False]] * 2


def test_spans_are_recorded_with_their_step():
    spans = []
    generate(planned(), Engines(), SAMPLING, record=lambda *span: spans.append(span))
    ((method, name, step, evaluation, start, end),) = spans
    assert (method, name, step, evaluation) == ("record_span", "timing_s/gen", 1, False)
    assert end >= start


@dataclass(frozen=True)
class GradedCredit(Credit):
    """A credit with a number of the group and a flag of each continuation that no other algorithm has."""

    surprise: float | None = None
    noted: Bools = field(default_factory=lambda: np.zeros(0, bool))


class Graded(GRPO):
    credit_type = GradedCredit

    def credit(self, group):
        plain = super().credit(group)
        return GradedCredit(plain.advantages, plain.actor_mask, surprise=0.1 + group.rewards[0], noted=group.rewards > 0.5)


def test_a_new_number_of_an_algorithms_credit_travels_to_its_samples_and_its_memory():
    algorithm = Graded(**vars(configure().algorithm))
    table = credit(judged(generate(planned(), Engines(), SAMPLING)), algorithm)
    assert table["surprise"].to_pylist() == [1.1, 1.1]
    first, second = samples_of(next(trainer_rows(table, GradedCredit)), GradedCredit)
    assert (first.credit, second.credit) == ({"surprise": 1.1, "noted": True}, {"surprise": 1.1, "noted": False})
    assert observed_groups(table, GradedCredit)[0].credit == {"surprise": 1.1, "noted": [True, False]}
    evaluated = credit(judged(generate(planned("eval"), Engines(), SAMPLING)), algorithm)
    assert evaluated.select(["surprise", "noted"]).to_pylist() == [{"surprise": None, "noted": [False, False]}] * 2
