"""The rows of a replay buffer, and how judged rollouts become them."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class ReplayError(ValueError):
    """A buffer that cannot be used here."""


SCHEMA = pa.schema(
    [
        ("sequence", pa.int64()),  # counts appended trajectories; unique in a buffer
        ("problem_id", pa.string()),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("prefix_len", pa.int32()),  # response tokens that were replayed when this trajectory was made
        ("response_length", pa.int32()),
        ("response_ids", pa.list_(pa.int32())),  # prefix and new tokens, stop token included
        ("rollout_logprobs", pa.list_(pa.float32())),  # those of the new tokens only
        ("policy_versions", pa.list_(pa.struct([("start", pa.int32()), ("version", pa.int32())]))),  # spans of new tokens
        ("step", pa.int32()),
        ("finish_reason", pa.string()),
        ("reward", pa.float32()),  # null where the judge gave none
        ("reward_status", pa.string()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("top_k", pa.int32()),
        ("seed", pa.int64()),
        ("tokenizer_hash", pa.string()),
    ]
)


def trajectories(rows: pa.Table, sampling: dict[str, Any]) -> pa.Table:
    """Judged rollout-group rows of one continuation each as the buffer's rows; `sampling` has temperature, top_p and top_k."""
    count, new = rows.num_rows, pc.list_flatten(rows["response_ids"])
    prefixes = np.asarray(pc.list_value_length(rows["prefix_ids"]))
    if prefixes.any():
        pairs = zip(rows["prefix_ids"], new, strict=True)
        whole = pa.array([np.concatenate([np.asarray(a.values), np.asarray(b.values)]) for a, b in pairs], pa.list_(pa.int32()))
    else:
        whole = new
    columns = {
        name: rows[name] for name in ("problem_id", "data_source", "ground_truth", "extra_info", "prompt_ids", "step", "seed")
    }
    columns |= {name: pc.list_flatten(rows[name]) for name in ("rollout_logprobs", "finish_reason", "reward", "reward_status")}
    columns |= {name: pa.repeat(sampling[name], count) for name in ("temperature", "top_p", "top_k")}
    columns |= {
        "prefix_len": prefixes,
        "response_ids": whole,
        "response_length": pc.list_value_length(whole),
        "policy_versions": [[{"start": 0, "version": version}] for version in rows["policy_version"].to_pylist()],
    }
    fields = [field for field in SCHEMA if field.name in columns]
    return pa.table([_as(columns[field.name], field.type) for field in fields], schema=pa.schema(fields))


def _as(values: Any, kind: pa.DataType) -> Any:
    return values.cast(kind) if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)


def check_alignment(table: pa.Table) -> None:
    """Every new token has its log-probability and every response its length."""
    lengths = np.asarray(pc.list_value_length(table["response_ids"]))
    if (lengths != np.asarray(table["response_length"])).any():
        raise ReplayError("a trajectory's response_length is not the length of its response_ids.")
    new = lengths - np.asarray(table["prefix_len"])
    if (new != np.asarray(pc.list_value_length(table["rollout_logprobs"]))).any():
        raise ReplayError("a trajectory has not exactly one log-probability per new token.")
