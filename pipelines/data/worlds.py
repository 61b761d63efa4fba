"""The embedded worlds: problems, demonstrations of a policy that has the skill but errs, and the values of its states.

`python -m pipelines.data.worlds STAGE --out FILE` writes what the tiny model is built from: responses, faultless first, then with
the faults to unlearn; and states with their values, for the critic's prompts. Problems of the validation splits are in none.
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
GRADED_OPERATIONS = (4, 20)
GIVE_UP = 0.25  # share of faulty graded demonstrations that end early
CARRY_ERROR, PLAIN_ERROR = 0.2, 0.01  # chance that a demonstrated step is wrong, with and without carry or borrow
CARRY_SLIPS, PLAIN_SLIPS = (-20, -10, 10, 20), (-1, 1)  # by how much such a step is wrong
WALK_DISTANCES = (20, 70)
WALK_SLACK = 2  # moves allowed beyond the fewest possible
WALK_RANDOM_MOVES = 0.5  # share of demonstrated moves that ignore the target

State = tuple[int, int]  # steps taken, and the number that the last one led to
Outcomes = list[tuple[float, int]]  # probabilities, and numbers that a step may lead to


@dataclass(frozen=True)
class Problem:
    """A prompt's text and what its verifier needs to know."""

    prompt: str
    ground_truth: str


def chain_problem(rng: random.Random, operations: int = CHAIN_OPERATIONS) -> Problem:
    """`37+5-9...`: a start number and twelve operations of one digit, modulo 100."""
    value = rng.randrange(100)
    text = f"{value:02d}"
    for _ in range(operations):
        sign, digit = rng.choice("+-"), rng.randint(1, 9)
        value = (value + (digit if sign == "+" else -digit)) % 100
        text += f"{sign}{digit}"
    return Problem(text, f"{value:02d}")


def graded_problem(rng: random.Random) -> Problem:
    """A chain of 4 to 20 operations; its verifier reads them."""
    text = chain_problem(rng, rng.randint(*GRADED_OPERATIONS)).prompt
    return Problem(text, text)


def chain_outcomes(problem: Problem, state: State, faulty: bool) -> Outcomes:
    """One operation; a faulty demonstrator slips, mostly in the tens when a step carries, and goes on from the wrong number."""
    done, value = state
    if 2 + 2 * done == len(problem.prompt):
        return []
    step = int(problem.prompt[2 + 2 * done : 4 + 2 * done])
    right = (value + step) % 100
    if not faulty:
        return [(1.0, right)]
    carries = not 0 <= value % 10 + step <= 9
    error, slips = (CARRY_ERROR, CARRY_SLIPS) if carries else (PLAIN_ERROR, PLAIN_SLIPS)
    return [(1 - error, right)] + [(error / len(slips), (right + slip) % 100) for slip in slips]


def chain_text(problem: Problem, state: State, after: int | None) -> str:
    """A step as it is written; the last repeats the number."""
    done, value = state
    return f"#{value:02d}" if after is None else f"{value:02d}{problem.prompt[2 + 2 * done : 4 + 2 * done]}={after:02d};"


def walk_problem(rng: random.Random, distances: tuple[int, int] = WALK_DISTANCES) -> Problem:
    """`37>82/07`: start, target 20 to 70 away, and the number of moves allowed."""
    while True:
        start, distance = rng.randrange(100), rng.randint(*distances) * rng.choice((-1, 1))
        if 0 <= start + distance < 100:
            break
    text = f"{start:02d}>{start + distance:02d}/{math.ceil(abs(distance) / 9) + WALK_SLACK:02d}"
    return Problem(text, text)


def walk_outcomes(problem: Problem, state: State, faulty: bool) -> Outcomes:
    """The largest move toward the target until it is met; a faulty demonstrator strays. Both give up when the moves are spent."""
    moves, here = state
    target, limit = int(problem.prompt[3:5]), int(problem.prompt[6:8])
    if here == target or moves == limit:
        return []
    toward = here + max(-9, min(9, target - here))
    if not faulty:
        return [(1.0, toward)]
    anywhere = [after for after in range(max(0, here - 9), min(99, here + 9) + 1) if after != here]
    return [(1 - WALK_RANDOM_MOVES, toward)] + [(WALK_RANDOM_MOVES / len(anywhere), after) for after in anywhere]


def walk_text(problem: Problem, state: State, after: int | None) -> str:
    """A move as it is written."""
    here = state[1]
    return "#" if after is None else f"{here:02d}{after - here:+d}={after:02d};"


@dataclass(frozen=True)
class World:
    """How to pose a problem and what a demonstrator may write at each state of an answer to it."""

    problem: Callable[[random.Random], Problem]
    outcomes: Callable[[Problem, State, bool], Outcomes]  # none where the answer ends
    text: Callable[[Problem, State, int | None], str]
    solved: Callable[[Problem, State], bool]  # by an answer that ends here

    def demonstration(self, problem: Problem, rng: random.Random, faulty: bool, detours: int = 0) -> str:
        """A whole response; the first `detours` steps are a faulty demonstrator's in any case."""
        text, state = "", start(problem)
        while outcomes := self.outcomes(problem, state, faulty or state[0] < detours):
            (after,) = rng.choices([after for _, after in outcomes], [share for share, _ in outcomes])
            text, state = text + self.text(problem, state, after), (state[0] + 1, after)
        return text + self.text(problem, state, None)

    def value(self, problem: Problem, prefix: str) -> float:
        """The faulty demonstrator's chance of success after `prefix`, a part of one of its responses."""
        known: dict[State, float] = {}

        def at(state: State) -> float:
            if state not in known:
                outcomes = self.outcomes(problem, state, True)
                chances = sum(share * at((state[0] + 1, after)) for share, after in outcomes)
                known[state] = chances if outcomes else float(self.solved(problem, state))
            return known[state]

        state, left = start(problem), prefix
        while outcomes := self.outcomes(problem, state, True):
            # What is there of a step narrows down what it will be.
            possible = [(share, after) for share, after in outcomes if _agree(left, self.text(problem, state, after))]
            if len(left) < len(self.text(problem, state, outcomes[0][1])):
                return sum(share * at((state[0] + 1, after)) for share, after in possible) / sum(share for share, _ in possible)
            left = left[len(self.text(problem, state, possible[0][1])) :]
            state = state[0] + 1, possible[0][1]
        return at(state)


def _agree(left: str, step: str) -> bool:
    return left.startswith(step) or step.startswith(left)


def start(problem: Problem) -> State:
    """The state of an empty response; prompts of all worlds begin with their number."""
    return 0, int(problem.prompt[:2])


WORLDS = {
    "chain_arithmetic": World(
        chain_problem, chain_outcomes, chain_text, lambda problem, state: f"{state[1]:02d}" == problem.ground_truth
    ),
    "graded_chain": World(
        graded_problem, chain_outcomes, chain_text, lambda problem, state: 2 + 2 * state[0] == len(problem.prompt)
    ),
    "number_walk": World(walk_problem, walk_outcomes, walk_text, lambda problem, state: state[1] == int(problem.prompt[3:5])),
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


STEP_CHARACTERS = 8
# Given in full: a schema inferred from the first row would drop the columns that it lacks.
EXAMPLES = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("response", pa.string()),
        ("value", pa.float64()),  # of a partial response; null where the response is to be learned
        ("reference", pa.string()),
    ]
)
NEAR = (1, 12)  # distances of walks that begin near their target, as landing on it is the hard part
MAX_DETOURS = 3  # of a walk that strays first: only where walks turn back must a model compare target and place at every move
VALUES = ("chain_value", "walk_value")
SOURCES: dict[str, tuple[str, Callable[[random.Random], Problem]]] = {
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


def _value_row(world: World, problem: Problem, rng: random.Random, outcomes: int | None = None) -> dict[str, Any]:
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


def _solution(world: World, problem: Problem, rng: random.Random) -> str:
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
