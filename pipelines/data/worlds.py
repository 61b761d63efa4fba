"""The embedded worlds: problems, and what a demonstrator that has the skill but errs may write at each state."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATIENCE = 10_000  # draws without a new problem after which a world is taken for exhausted
VALIDATION = 256  # problems of each world that are never trained on
CHAIN_OPERATIONS = 12
GRADED_OPERATIONS = (4, 20)
CARRY_ERROR, PLAIN_ERROR = 0.2, 0.01  # chance that a demonstrated step is wrong, with and without carry or borrow
CARRY_SLIPS, PLAIN_SLIPS = (-20, -10, 10, 20), (-1, 1)  # how far off such a step is
WALK_DISTANCES = (20, 70)
WALK_SLACK = 2  # moves allowed beyond the fewest possible
WALK_RANDOM_MOVES = 0.5  # share of demonstrated moves that ignore the target

State = tuple[int, int]  # steps taken, and the number that the last one led to
Outcomes = list[tuple[float, int]]  # probabilities, and numbers that a step may lead to


@dataclass(frozen=True)
class Puzzle:
    """A prompt's text and what its verifier needs to know."""

    prompt: str
    ground_truth: str


def chain_problem(rng: random.Random, operations: int = CHAIN_OPERATIONS) -> Puzzle:
    """`37+5-9...`: a start number and twelve operations of one digit, modulo 100."""
    value = rng.randrange(100)
    text = f"{value:02d}"
    for _ in range(operations):
        sign, digit = rng.choice("+-"), rng.randint(1, 9)
        value = (value + (digit if sign == "+" else -digit)) % 100
        text += f"{sign}{digit}"
    return Puzzle(text, f"{value:02d}")


def graded_problem(rng: random.Random) -> Puzzle:
    """A chain of 4 to 20 operations; its verifier reads them."""
    text = chain_problem(rng, rng.randint(*GRADED_OPERATIONS)).prompt
    return Puzzle(text, text)


def chain_outcomes(problem: Puzzle, state: State, faulty: bool) -> Outcomes:
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


def chain_text(problem: Puzzle, state: State, after: int | None) -> str:
    """A step as it is written; the last repeats the number."""
    done, value = state
    return f"#{value:02d}" if after is None else f"{value:02d}{problem.prompt[2 + 2 * done : 4 + 2 * done]}={after:02d};"


def walk_problem(rng: random.Random, distances: tuple[int, int] = WALK_DISTANCES) -> Puzzle:
    """`37>82/07`: start, target 20 to 70 away, and the number of moves allowed."""
    while True:
        start, distance = rng.randrange(100), rng.randint(*distances) * rng.choice((-1, 1))
        if 0 <= start + distance < 100:
            break
    text = f"{start:02d}>{start + distance:02d}/{math.ceil(abs(distance) / 9) + WALK_SLACK:02d}"
    return Puzzle(text, text)


def walk_outcomes(problem: Puzzle, state: State, faulty: bool) -> Outcomes:
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


def walk_text(problem: Puzzle, state: State, after: int | None) -> str:
    """A move as it is written."""
    here = state[1]
    return "#" if after is None else f"{here:02d}{after - here:+d}={after:02d};"


@dataclass(frozen=True)
class World:
    """How to pose a problem and what a demonstrator may write at each state of an answer to it."""

    problem: Callable[[random.Random], Puzzle]
    outcomes: Callable[[Puzzle, State, bool], Outcomes]  # none where the answer ends
    text: Callable[[Puzzle, State, int | None], str]
    solved: Callable[[Puzzle, State], bool]  # whether an answer that ends here is right

    def demonstration(self, problem: Puzzle, rng: random.Random, faulty: bool, detours: int = 0) -> str:
        """A whole response; the first `detours` steps are a faulty demonstrator's in any case."""
        text, state = "", start(problem)
        while outcomes := self.outcomes(problem, state, faulty or state[0] < detours):
            (after,) = rng.choices([after for _, after in outcomes], [share for share, _ in outcomes])
            text, state = text + self.text(problem, state, after), (state[0] + 1, after)
        return text + self.text(problem, state, None)

    def value(self, problem: Puzzle, prefix: str) -> float:
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


def start(problem: Puzzle) -> State:
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
