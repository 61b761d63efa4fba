"""Demonstrations of the embedded worlds' policies and the values of their states: what the tiny model is fine-tuned on.

`python -m pipelines.data.demonstrations STAGE --out FILE` writes a fine-tuning stage: responses, faultless first, then with the
faults to unlearn; and states with their values, for the self-critic's prompts. Problems of the validation splits are in none.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.data.worlds import (
    VALIDATION,
    WALK_DISTANCES,
    WORLDS,
    Puzzle,
    World,
    chain_problem,
    graded_problem,
    problem_rows,
    walk_problem,
)

GIVE_UP = 0.25  # share of faulty graded demonstrations that end early
STEP_CHARACTERS = 8
# Given in full: a schema inferred from the first row would drop the columns that it lacks.
EXAMPLES = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("response", pa.string()),
        ("value", pa.float64()),  # worth of a partial response; null where the response is to be learned
        ("reference", pa.string()),
    ]
)
NEAR = (1, 12)  # distances of walks that begin near their target, as landing on it is the hard part
MAX_DETOURS = 3  # a walk strays up to this often: only where walks turn back must a model compare target and place at every move
VALUES = ("chain_value", "walk_value")
SOURCES: dict[str, tuple[str, Callable[[random.Random], Puzzle]]] = {
    "chain": ("chain_arithmetic", chain_problem),
    "walk": ("number_walk", walk_problem),
    "near_walk": ("number_walk", lambda rng: walk_problem(rng, NEAR)),
    "detour_walk": ("number_walk", lambda rng: walk_problem(rng, WALK_DISTANCES if rng.random() < 0.5 else (1, 20))),
    "chain_value": ("chain_arithmetic", chain_problem),
    "walk_value": ("number_walk", walk_problem),
    "graded_chain": ("graded_chain", graded_problem),
}

# Fine-tuning stages: how many examples, of what, and whether demonstrations have faults (detours always end faultless). The skill
# comes first; faults are learned late, long and beside much else, as they would unlearn the skill. Values are the faulty
# demonstrator's: exact at first, and in the last stage the means of small groups, whose noise training will bring.
STAGES = {
    "skill": [
        (30_000, {"chain": 0.6, "walk": 0.2, "near_walk": 0.2}, False),
        (150_000, {"chain": 0.1, "walk": 0.3, "near_walk": 0.6}, False),
    ],
    "value": [(130_000, {"chain": 0.1, "detour_walk": 0.4, "chain_value": 0.3, "walk_value": 0.2}, False)],
    "noise": [(45_000, {"chain": 0.25, "walk": 0.3, "detour_walk": 0.1, "chain_value": 0.1, "walk_value": 0.25}, True)],
    # Walks that end faultless bring the walk's score, which landing decides, up to where the chain's is.
    "balance": [(22_000, {"chain": 0.2, "walk": 0.2, "detour_walk": 0.35, "chain_value": 0.05, "walk_value": 0.2}, True)],
    # Not part of the shipped model: where runs on graded chains begin.
    "graded": [(24_000, {"graded_chain": 1.0}, False), (16_000, {"graded_chain": 1.0}, True)],
}


GROUPS = {"balance": 8}  # outcomes whose mean stands for a value


def stage_rows(stage: str, seed: int, limit: int | None = None) -> list[dict[str, Any]]:
    """The examples of a fine-tuning stage, or the first of them, in their order; validation problems are left out."""
    held_out = {row["prompt"][0]["content"] for world in WORLDS for row in problem_rows(world, "validation", VALIDATION)}
    rng, rows = random.Random(f"{stage}/{seed}"), list[dict[str, Any]]()
    for count, shares, faulty in STAGES[stage]:
        for source in rng.choices(list(shares), list(shares.values()), k=count):
            name, pose = SOURCES[source]
            problem = pose(rng)
            if len(rows) == limit:
                return rows
            if problem.prompt in held_out:
                continue
            if source in VALUES:
                rows.append(_value_row(WORLDS[name], problem, rng, GROUPS.get(stage)))
            else:
                detours = rng.randint(0, MAX_DETOURS) if source == "detour_walk" else 0
                response = WORLDS[name].demonstration(problem, rng, faulty and source != "detour_walk", detours)
                if name == "graded_chain" and faulty and rng.random() < GIVE_UP:
                    response = _given_up(response, rng)
                rows.append({"prompt": [{"role": "user", "content": problem.prompt}], "response": response})
    return rows


def _given_up(response: str, rng: random.Random) -> str:
    """A chain's first steps and the number that they led to as its end."""
    steps = response.split(";")[:-1]
    kept = steps[: rng.randint(1, len(steps))]
    return ";".join(kept) + f";#{kept[-1][-2:]}"


def _value_row(world: World, problem: Puzzle, rng: random.Random, outcomes: int | None = None) -> dict[str, Any]:
    """A state that the faulty demonstrator reaches, its value (or the mean of some outcomes), every other time with a solution."""
    response = world.demonstration(problem, rng, True)
    cut = rng.randrange(len(response))
    prefix = response[: cut - cut % STEP_CHARACTERS] if rng.random() < 0.5 else response[:cut]
    reference = _solution(world, problem, rng) if rng.random() < 0.5 else None
    value = world.value(problem, prefix)
    if outcomes is not None:
        value = sum(rng.random() < value for _ in range(outcomes)) / outcomes
    return {
        "prompt": [{"role": "user", "content": problem.prompt}],
        "response": prefix,
        "value": round(value, 4),
        "reference": reference,
    }


def _solution(world: World, problem: Puzzle, rng: random.Random) -> str:
    """A response that solves the problem: the first of some faulty ones that does, else the faultless one."""
    for _ in range(3):
        attempt = world.demonstration(problem, rng, True)
        if world.value(problem, attempt) == 1:
            return attempt
    return world.demonstration(problem, rng, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES, help="which fine-tuning set to write")
    parser.add_argument("--out", required=True, help="Parquet file to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = stage_rows(args.stage, args.seed)
    pq.write_table(pa.Table.from_pylist(rows, schema=EXAMPLES), args.out)
    print(f"{len(rows)} examples written to {args.out}")


if __name__ == "__main__":
    main()
