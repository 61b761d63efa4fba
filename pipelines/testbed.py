"""The two embedded worlds: problems, and demonstrations of a policy that has the skill but errs.

`python -m pipelines.testbed` writes what the tiny model and `make demo` are built from: problem sets as dataset rows (train and
validation disjoint by seed) and fine-tuning sets of prompt/response pairs, first faultless, then with the faults to unlearn.
"""

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PATIENCE = 10_000  # draws without a new problem after which a world is taken for exhausted
VALIDATION = 256  # problems of each world that are never trained on
CHAIN_OPERATIONS = 12
CARRY_ERROR, PLAIN_ERROR = 0.2, 0.01  # chance that a demonstrated step is wrong, with and without carry or borrow
CARRY_SLIPS, PLAIN_SLIPS = (-20, -10, 10, 20), (-1, 1)  # by how much such a step is wrong
WALK_DISTANCES = (20, 70)
WALK_SLACK = 2  # moves allowed beyond the fewest possible
WALK_RANDOM_MOVES = 0.5  # share of demonstrated moves that ignore the target


@dataclass(frozen=True)
class Problem:
    """A prompt's text and what its verifier needs to know."""

    prompt: str
    ground_truth: str


def chain_problem(rng: random.Random) -> Problem:
    """`37+5-9...`: a start number and twelve operations of one digit, modulo 100."""
    value = rng.randrange(100)
    text = f"{value:02d}"
    for _ in range(CHAIN_OPERATIONS):
        sign, digit = rng.choice("+-"), rng.randint(1, 9)
        value = (value + (digit if sign == "+" else -digit)) % 100
        text += f"{sign}{digit}"
    return Problem(text, f"{value:02d}")


def chain_demonstration(problem: Problem, rng: random.Random, noisy: bool) -> str:
    """All steps of a chain; noisy ones slip, mostly in the tens when a step carries, and go on from the wrong number."""
    value, steps = int(problem.prompt[:2]), list[str]()
    for i in range(2, len(problem.prompt), 2):
        sign, digit = problem.prompt[i], int(problem.prompt[i + 1])
        step = digit if sign == "+" else -digit
        result = (value + step) % 100
        carries = not 0 <= value % 10 + step <= 9
        if noisy and rng.random() < (CARRY_ERROR if carries else PLAIN_ERROR):
            result = (result + rng.choice(CARRY_SLIPS if carries else PLAIN_SLIPS)) % 100
        steps.append(f"{value:02d}{sign}{digit}={result:02d};")
        value = result
    return "".join(steps) + f"#{value:02d}"


def walk_problem(rng: random.Random, distances: tuple[int, int] = WALK_DISTANCES) -> Problem:
    """`37>82/07`: start, target 20 to 70 away, and the number of moves allowed."""
    while True:
        start, distance = rng.randrange(100), rng.randint(*distances) * rng.choice((-1, 1))
        if 0 <= start + distance < 100:
            break
    text = f"{start:02d}>{start + distance:02d}/{math.ceil(abs(distance) / 9) + WALK_SLACK:02d}"
    return Problem(text, text)


def walk_demonstration(problem: Problem, rng: random.Random, noisy: bool) -> str:
    """Largest moves toward the target until it is met; noisy ones stray, and give up when the moves are spent."""
    here, target, limit = int(problem.prompt[:2]), int(problem.prompt[3:5]), int(problem.prompt[6:8])
    moves: list[str] = []
    while here != target and len(moves) < limit:
        step = max(-9, min(9, target - here))
        if noisy and rng.random() < WALK_RANDOM_MOVES:
            step = rng.choice([s for s in range(-9, 10) if s and 0 <= here + s < 100])
        moves.append(f"{here:02d}{'+' if step > 0 else '-'}{abs(step)}={here + step:02d};")
        here += step
    return "".join(moves) + "#"


@dataclass(frozen=True)
class World:
    """How to pose a problem of a world and how to demonstrate an answer to it."""

    problem: Callable[[random.Random], Problem]
    demonstration: Callable[[Problem, random.Random, bool], str]


WORLDS = {
    "chain_arithmetic": World(chain_problem, chain_demonstration),
    "number_walk": World(walk_problem, walk_demonstration),
}


def problem_rows(world: str, split: str, count: int) -> list[dict[str, Any]]:
    """`count` distinct problems as dataset rows; train and validation never share one. ValueError if the world has fewer."""
    taken = {row["prompt"][0]["content"] for row in problem_rows(world, "validation", VALIDATION)} if split == "train" else set()
    rng = random.Random(f"{world}/{split}")
    rows: list[dict[str, Any]] = []
    misses = 0  # draws in a row that brought nothing new
    while len(rows) < count:
        problem = WORLDS[world].problem(rng)
        if problem.prompt in taken:
            misses += 1
            if misses > PATIENCE:
                raise ValueError(f"world {world} has {len(rows)} distinct {split} problems, not {count}: lower the count.")
            continue
        misses = 0
        taken.add(problem.prompt)
        rows.append(
            {
                "data_source": world,
                "prompt": [{"role": "user", "content": problem.prompt}],
                "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
                "extra_info": {"split": split, "index": len(rows)},
                "problem_id": f"{world}/{split}/{len(rows)}",
            }
        )
    return rows


# Fine-tuning stages: how many demonstrations, of what, with or without faults. Landing on a target is the hard part, so walks that
# begin near theirs dominate once the chains are learned. The skill comes first and the noise last: noise alone is not learned from.
STAGES = {
    "skill": [
        (30_000, {"chain_arithmetic": 0.6, "number_walk": 0.2, "near_walk": 0.2}, False),
        (150_000, {"chain_arithmetic": 0.1, "number_walk": 0.3, "near_walk": 0.6}, False),
    ],
    "noise": [(20_000, {"chain_arithmetic": 0.6, "number_walk": 0.4}, True)],
}
NEAR = (1, 12)


def demonstration_rows(stage: str, seed: int) -> list[dict[str, Any]]:
    """The prompt/response pairs of a fine-tuning stage, in their order; validation problems are left out."""
    held_out = {row["prompt"][0]["content"] for world in WORLDS for row in problem_rows(world, "validation", VALIDATION)}
    worlds = WORLDS | {"near_walk": World(lambda rng: walk_problem(rng, NEAR), walk_demonstration)}
    rng, rows = random.Random(f"{stage}/{seed}"), list[dict[str, Any]]()
    for count, shares, noisy in STAGES[stage]:
        for name in rng.choices(list(shares), list(shares.values()), k=count):
            problem = worlds[name].problem(rng)
            if problem.prompt not in held_out:
                messages = [{"role": "user", "content": problem.prompt}]
                rows.append({"prompt": messages, "response": worlds[name].demonstration(problem, rng, noisy)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES, help="which fine-tuning set to write")
    parser.add_argument("--out", required=True, help="Parquet file to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = demonstration_rows(args.stage, args.seed)
    pq.write_table(pa.Table.from_pylist(rows), args.out)
    print(f"{len(rows)} demonstrations written to {args.out}")


if __name__ == "__main__":
    main()
