"""One row, growing as it flows: the rollout group, its columns by stage, and the check at the door of each stage."""

import dataclasses
from types import NoneType
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from algorithms.types import Bools, Credit, Floats

IDS, LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.float32())

PLAN = [
    ("row_id", pa.int64()),  # step and place within it; unique in a run
    ("step", pa.int32()),
    ("problem_id", pa.string()),
    ("data_source", pa.string()),
    ("ground_truth", pa.string()),  # JSON, as `extra_info`, with the types that the row had (`serve/typed_json.py`)
    ("extra_info", pa.string()),
    ("prompt_ids", IDS),
    ("prefix_ids", IDS),  # the part of a response that is already there; prompt to engine and trainer alike
    ("n", pa.int32()),
    ("max_new_tokens", pa.int32()),
    ("purpose", pa.string()),  # train | refill | audit | eval
    ("policy_version", pa.int32()),  # the weights this row must be sampled from
    ("seed", pa.int64()),
    ("chunk", pa.bool_()),  # `max_new_tokens` ends a chunk and not the response budget
    ("ask_value", pa.bool_()),  # ask the self-critic for the value of the state
    ("reference_ids", IDS),  # null, or a solution of the problem for the self-critic's prompt
]
GENERATE = [
    ("response_ids", pa.list_(IDS)),  # [n][tokens], stop token included
    ("response_text", pa.list_(pa.string())),  # prefix and response together, for judges and people; the ids are the truth
    ("rollout_logprobs", pa.list_(LOGPROBS)),  # at the sampling temperature
    ("finish_reason", pa.list_(pa.string())),  # stop | length
    ("truncated", pa.list_(pa.bool_())),  # the response budget was exhausted; decided here, and read everywhere else
    ("self_scored", pa.list_(pa.bool_())),  # endpoints that are the self-critic's to score and not the judge's
    ("endpoint_value", pa.list_(pa.float32())),  # the self-critic's; null where it was not asked or answered with none
    ("prefix_value", pa.float32()),  # the self-critic's of the state; null likewise
    ("reference_left_out", pa.bool_()),  # the reference would have made the self-critic's prompt too long
]
JUDGE = [
    ("reward", pa.list_(pa.float32())),  # null where the judge failed, or was not asked
    ("acc", pa.list_(pa.float32())),  # how right the verifier found it, whatever the reward for that is; null where the reward is
    ("reward_status", pa.list_(pa.string())),  # ok | self_critic | timeout | error: ...
]
STAGES = {
    "plan": pa.schema(PLAN),
    "generate": pa.schema(PLAN + GENERATE),
    "judge": pa.schema(PLAN + GENERATE + JUDGE),
}
NOT_BY_CONTINUATION = ("prompt_ids", "prefix_ids", "reference_ids")  # all other lists have an entry per continuation
PURPOSES = ("train", "refill", "audit", "eval")


class SchemaError(ValueError):
    """A table that is not what its stage promises."""


# The column types of the fields that an algorithm's Credit may have.
COLUMN_TYPES = {Floats: LOGPROBS, Bools: pa.list_(pa.bool_()), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def credited(credit_type: type[Credit]) -> pa.Schema:
    """The schema after the credit stage: a column for each field of an algorithm's Credit."""
    hints = get_type_hints(credit_type)
    columns = []
    for field in dataclasses.fields(credit_type):
        kinds = [kind for kind in get_args(hints[field.name]) or (hints[field.name],) if kind is not NoneType]
        kind = hints[field.name] if hints[field.name] in (Floats, Bools) else kinds[0]
        if kind not in COLUMN_TYPES:
            raise SchemaError(f"{credit_type.__name__}.{field.name}: a credit's fields are Floats, Bools, bool, int or float.")
        columns.append((field.name, COLUMN_TYPES[kind]))
    return pa.schema([*STAGES["judge"], *(pa.field(*column) for column in columns)])


def check(table: pa.Table, stage: str, credit_type: type[Credit] = Credit) -> pa.Table:
    """Return the table, in the column order of `stage`, or raise SchemaError naming the first column or row that is wrong.

    Stages are plan, generate, judge and credit; the last one's columns are those of `credit_type`.
    """
    wanted = credited(credit_type) if stage == "credit" else STAGES[stage]
    if missing := [name for name in wanted.names if name not in table.column_names]:
        raise SchemaError(f"after {stage}: no column {missing[0]!r}.")
    table = table.select(wanted.names)
    for field in wanted:
        if table.schema.field(field.name).type != field.type:
            raise SchemaError(f"after {stage}: column {field.name!r} is {table.schema.field(field.name).type}, not {field.type}.")
    if not table.num_rows:
        return table
    if unknown := set(table["purpose"].to_pylist()) - set(PURPOSES):
        raise SchemaError(f"after {stage}: purpose {unknown.pop()!r} is none of {', '.join(PURPOSES)}.")
    if pc.min(pc.list_value_length(table["prompt_ids"])).as_py() == 0:
        raise SchemaError(f"after {stage}: a row has an empty prompt.")
    _check_group_sizes(table, stage)
    if stage != "plan":
        _check_logprobs(table, stage)
    return table


def _check_group_sizes(table: pa.Table, stage: str) -> None:
    n = np.asarray(table["n"])
    for name, kind in [(field.name, field.type) for field in table.schema]:
        if name in NOT_BY_CONTINUATION or not pa.types.is_list(kind):
            continue
        sizes = np.asarray(pc.list_value_length(table[name]))
        if (sizes != n).any():
            at = int(np.argmax(sizes != n))
            raise SchemaError(f"after {stage}: row {table['row_id'][at]} has {sizes[at]} of {n[at]} entries in {name!r}.")


def _check_logprobs(table: pa.Table, stage: str) -> None:
    """Every sampled token has exactly one log-probability: the loss mask and its numbers cannot drift apart."""
    tokens = np.asarray(pc.list_value_length(pc.list_flatten(table["response_ids"])))
    logprobs = np.asarray(pc.list_value_length(pc.list_flatten(table["rollout_logprobs"])))
    if (tokens != logprobs).any():
        at = int(np.argmax(tokens != logprobs))
        raise SchemaError(f"after {stage}: a response of {tokens[at]} tokens has {logprobs[at]} log-probabilities.")


def append(table: pa.Table, columns: dict[str, list], stage: str, credit_type: type[Credit] = Credit) -> pa.Table:
    """Add a stage's columns to a table and check the result."""
    wanted = credited(credit_type) if stage == "credit" else STAGES[stage]
    for name, values in columns.items():
        table = table.append_column(wanted.field(name), pa.array(values, type=wanted.field(name).type))
    return check(table, stage, credit_type)
