"""Stages without a cluster: what each adds to a table and what it refuses."""

import pyarrow as pa
import pytest

from algorithms.types import Problem, PromptRow
from pipelines.engines.engine import Sampling
from pipelines.rollout.dataset import credit, generate, judge_rows, schema
from pipelines.rollout.plan import plan_table
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
                "from_critic": [False] * row["n"],
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
    rewards = {"reward": [[1.0, 0.0]] * table.num_rows, "reward_status": [["ok", "ok"]] * table.num_rows}
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
    assert credit(table, configure().algorithm).schema.equals(schema.STAGES["credit"])


def test_credit_adds_advantages_and_leaves_evaluation_rows_without():
    train = credit(judged(generate(planned(), Engines(), SAMPLING)), configure().algorithm)
    assert train["advantage"].to_pylist() == [[0.5, -0.5]] * 2
    assert train["keep"].to_pylist() == [True, True]
    evaluated = credit(judged(generate(planned("eval"), Engines(), SAMPLING)), configure().algorithm)
    assert evaluated["keep"].to_pylist() == [False, False]
    assert evaluated["actor_mask"].to_pylist() == [[False, False]] * 2


def test_spans_are_recorded_with_their_step():
    spans = []
    generate(planned(), Engines(), SAMPLING, record=lambda *span: spans.append(span))
    ((name, step, evaluation, start, end),) = spans
    assert (name, step, evaluation) == ("gen", 1, False)
    assert end >= start
