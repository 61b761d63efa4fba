"""From the rows an algorithm plans to the table that flows: ids that are unique in a run, seeds that depend on nothing else."""

import numpy as np
import pyarrow as pa

from algorithms.types import PromptRow
from pipelines.rollout import schema

ROWS_PER_STEP = 1_000_000  # row ids of one step
EVAL_ROWS = ROWS_PER_STEP // 2  # where evaluation rows begin within a step


def plan_table(rows: list[PromptRow], step: int, first: int, policy_version: int, seed: int) -> pa.Table:
    """The planned rows of a step as a table, numbered from `first`; each row's sampling seed follows from the run's and its id."""
    ids = [step * ROWS_PER_STEP + first + i for i in range(len(rows))]
    table = pa.Table.from_pylist(
        [
            {
                "row_id": row_id,
                "step": step,
                "problem_id": row.problem.problem_id,
                "data_source": row.problem.data_source,
                "ground_truth": row.problem.ground_truth,
                "extra_info": row.problem.extra_info,
                "prompt_ids": row.problem.prompt_ids,
                "prefix_ids": row.prefix_ids,
                "n": row.n,
                "max_new_tokens": row.max_new_tokens,
                "purpose": row.purpose,
                "policy_version": policy_version,
                "chunk": row.chunk,
                "ask_value": row.ask_value,
                "reference_ids": row.reference_ids,
                "seed": int(np.random.SeedSequence([seed, row_id]).generate_state(1)[0]),
            }
            for row_id, row in zip(ids, rows, strict=True)
        ],
        schema=schema.STAGES["plan"],
    )
    return schema.check(table, "plan")
