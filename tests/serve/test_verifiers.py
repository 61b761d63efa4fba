import json
import random

import pytest
import reasoning_gym
import reasoning_gym.factory

from pipelines.data import demonstrations, worlds
from serve import typed_json
from serve.verifiers import chain_arithmetic, find, graded_chain, number_walk
from serve.verifiers.math_answer import score as math_score
from serve.verifiers.reasoning_gym_task import score as gym_score
from tests.conftest import configure


@pytest.mark.parametrize(
    ("response", "reward"),
    [("37+5=42;42-9=33;#33", 1.0), ("37+5=42;42-9=34;#34", 0.0), ("#33", 1.0), ("33", 0.0), ("#33;", 0.0), ("", 0.0)],
)
def test_chain_arithmetic_scores_the_final_number(response, reward):
    assert chain_arithmetic.score(response, "33", {}) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("37+9=46;46+9=55;55+3=58;#", 1.0),
        ("37+9=46;46+9=55;55+3=58;", 0.0),  # not ended
        ("37+9=46;46+9=56;56+2=58;#", 0.0),  # a wrong step
        ("37+9=46;55+3=58;#", 0.0),  # a jump
        ("37+9=46;46+9=55;#", 0.0),  # not there
        ("37+9=46;46+9=55;55+1=56;56+1=57;57+1=58;#", 0.0),  # too many moves
        ("#", 0.0),
    ],
)
def test_number_walk_wants_the_target_with_every_step_right(response, reward):
    assert number_walk.score(response, "37>58/04", {}) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("37+5=42;42-9=33;33+8=41;41-1=40;#40", 1.0),
        ("37+5=42;42-9=33;33+8=31;31-1=30;#30", 0.5),  # wrong from the third step on
        ("37+5=42;42-9=33;33+8=31;41-1=40;#40", 0.5),  # what comes after a wrong step does not count
        ("37+5=42;#42", 0.25),  # given up
        ("37+5=42;42-9=33;33+8=41;41-1=40;", 0.0),  # not ended
        ("37+5=42;42-9=33;33+8=4#41", 0.5),
        ("42-9=33;#33", 0.0),  # a step left out
        ("#40", 0.0),
        ("", 0.0),
    ],
)
def test_graded_chain_scores_the_part_that_is_right(response, reward):
    assert graded_chain.score(response, "37+5-9+8-1", {}) == reward


NOISY = {"chain_arithmetic": (0.25, 0.45), "graded_chain": (0.45, 0.65), "number_walk": (0.25, 0.45)}  # graded: part by part


@pytest.mark.parametrize("world", worlds.WORLDS)
def test_faultless_demonstrations_score_one_and_noisy_ones_about_a_third(world):
    rng, score = random.Random(0), find(world).load()
    problems = [worlds.WORLDS[world].problem(rng) for _ in range(1000)]
    demonstrate = worlds.WORLDS[world].demonstration
    assert all(score(demonstrate(p, rng, False), p.ground_truth, {}) == 1.0 for p in problems)
    mean = sum(score(demonstrate(p, rng, True), p.ground_truth, {}) for p in problems) / len(problems)
    low, high = NOISY[world]
    assert low < mean < high


def test_given_up_chains_end_early_with_the_number_they_reached():
    rows = demonstrations.stage_rows("graded", seed=0)[-4000:]
    score = find("graded_chain").load()
    early = [row for row in rows if row["response"].count(";") < (len(row["prompt"][0]["content"]) - 2) // 2]
    assert 0.2 < len(early) / len(rows) < 0.25  # a cut after the last step is no cut
    assert all(row["response"][-2:] == row["response"][-6:-4] for row in early)
    assert 0 < sum(score(row["response"], row["prompt"][0]["content"], {}) for row in early) / len(early) < 0.6


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("so it is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("<think>\\boxed{3}</think> The answer is 72.", "48 + 24 = 72\n#### 72", 1.0),
        ("The answer is 71.", "#### 72", 0.0),
        ("no answer", "72", 0.0),
    ],
)
def test_math_compares_expressions(response, truth, reward):
    assert math_score(response, truth, {}) == reward


def test_reasoning_gym_scores_with_the_dataset():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    extra = {"entry": entry, "options": {}}
    assert gym_score(f"<answer>{entry['answer']}</answer>", "", extra) == 1.0
    assert gym_score(entry["answer"], "", extra) == 1.0
    assert gym_score("nonsense", "", extra) < 1.0


def test_unknown_source_names_the_near_ones():
    with pytest.raises(LookupError, match="chain_arithmetic"):
        find("chain_arithmetics")


def test_no_validation_problem_is_trained_on():
    for world in worlds.WORLDS:
        prompts = {
            split: {r["prompt"][0]["content"] for r in worlds.problem_rows(world, split, 256)} for split in ("train", "validation")
        }
        assert len(prompts["train"]) == len(prompts["validation"]) == 256
        assert not prompts["train"] & prompts["validation"]
    held_out = {r["prompt"][0]["content"] for w in worlds.WORLDS for r in worlds.problem_rows(w, "validation", worlds.VALIDATION)}
    assert not held_out & {row["prompt"][0]["content"] for row in demonstrations.stage_rows("noise", seed=0, limit=2000)}


def test_every_embedded_task_has_the_problems_that_its_configuration_asks_for():
    for world in worlds.WORLDS:
        config = configure(f"task={world}").task
        for data in (config.train, config.validation):
            assert len(worlds.problem_rows(world, data.split, data.count)) == data.count


def test_a_world_with_too_few_problems_says_so():
    with pytest.raises(ValueError, match=r"number_walk has \d+ distinct train problems, not 8192: lower the count"):
        worlds.problem_rows("number_walk", "train", 8192)


# What these datasets' entries say is a right answer, where `answer` itself is none.
EXAMPLES = {"propositional_logic": "example_answer", "rubiks_cube": "example_correct_answer", "graph_color": "possible_answer"}
UNANSWERED = ("boxnet", "rush_hour")  # no entry holds a right answer


@pytest.mark.parametrize("name", sorted(set(reasoning_gym.factory.DATASETS) - {"composite"}))
def test_every_reasoning_gym_dataset_scores_its_own_answer_in_full(name):
    for entry in reasoning_gym.create_dataset(name, size=2, seed=1):
        kept = typed_json.loads(typed_json.dumps(entry))
        assert kept == entry
        answer = entry["answer"] if entry["answer"] is not None else entry["metadata"].get(EXAMPLES.get(name))
        if answer is None:
            assert name in UNANSWERED
            continue
        text = json.dumps(answer) if isinstance(answer, dict) else answer
        response = f"<think>5 <answer>5</answer></think><answer>{text}</answer>"
        item = {"response": response, "ground_truth": "", "extra_info": {"entry": kept}}
        assert find(f"reasoning_gym/{name}").score(item) == 1.0
