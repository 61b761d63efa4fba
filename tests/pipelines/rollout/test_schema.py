import itertools

import pyarrow as pa
import pytest

from algorithms.ac2 import AC2Credit
from algorithms.types import Problem, PromptRow
from pipelines.rollout import schema
from pipelines.rollout.plan import plan_table


def planned(count=2, n=2):
    problem = Problem("p", "chain_arithmetic", [1, 2, 3], "33")
    return plan_table([PromptRow(problem, n, 10)] * count, step=1, first=0, policy_version=0, seed=0)


def generated(**changes):
    columns = {
        "response_ids": [[[5, 6], [7]]] * 2,
        "response_text": [["a", "b"]] * 2,
        "rollout_logprobs": [[[-0.1, -0.2], [-0.3]]] * 2,
        "finish_reason": [["stop", "length"]] * 2,
        "truncated": [[False, True]] * 2,
        "self_scored": [[False, True]] * 2,
        "endpoint_value": [[None, 0.5]] * 2,
        "prefix_value": [0.3, None],
        "reference_left_out": [False] * 2,
    }
    return schema.append(planned(), columns | changes, "generate")


def test_stages_only_add_columns():
    names = [stage.names for stage in (*schema.STAGES.values(), schema.credited(AC2Credit))]
    for earlier, later in itertools.pairwise(names):
        assert later[: len(earlier)] == earlier


def test_a_good_table_passes():
    assert generated().schema.equals(schema.STAGES["generate"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": [[[5, 6]], [[5], [6]]]}, "1 of 2 entries in 'response_ids'"),
        ({"rollout_logprobs": [[[-0.1], [-0.3]]] * 2}, "2 tokens has 1 log-prob"),
    ],
)
def test_what_does_not_align_is_refused(changes, message):
    with pytest.raises(schema.SchemaError, match=message):
        generated(**changes)


def test_missing_column_wrong_type_purpose_and_empty_prompt_are_named():
    table = planned()
    with pytest.raises(schema.SchemaError, match="no column 'seed'"):
        schema.check(table.drop_columns(["seed"]), "plan")
    with pytest.raises(schema.SchemaError, match="'n' is string"):
        schema.check(table.set_column(table.column_names.index("n"), "n", pa.array(["2", "2"])), "plan")
    with pytest.raises(schema.SchemaError, match="purpose 'fun'"):
        schema.check(table.set_column(table.column_names.index("purpose"), "purpose", pa.array(["fun", "train"])), "plan")
    empty = pa.array([[], [1]], type=schema.IDS)
    with pytest.raises(schema.SchemaError, match="empty prompt"):
        schema.check(table.set_column(table.column_names.index("prompt_ids"), "prompt_ids", empty), "plan")


def test_seeds_follow_from_run_and_row_only():
    assert planned(2)["seed"].to_pylist() == planned(3)["seed"].to_pylist()[:2]
    assert len(set(planned(50)["seed"].to_pylist())) == 50
