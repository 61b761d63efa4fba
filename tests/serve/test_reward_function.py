"""A user's own reward: every way in which it can go wrong is a missing reward with a reason, and the others are scored."""

import asyncio

import pytest

from serve.pool import SandboxPool
from serve.reward_function import RewardConfig, RewardFunction
from serve.sandbox import Sandbox

SOURCE = """
import asyncio, json, time
from math import nan

def verl(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise": raise KeyError("gone")
    if solution_str == "hang": time.sleep(60)
    if solution_str == "nan": return nan
    if solution_str == "text": return "1.0"
    if solution_str == "dict": return {"score": 0.25, "other": 1}
    if solution_str == "acc": return {"score": -1.0, "acc": True}
    return float(solution_str == ground_truth and extra_info["index"] == 7)

async def slow(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(60 if solution_str == "hang" else 0.2)
    if solution_str == "raise": raise KeyError("gone")
    return 1.0

async def blocking(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "block": time.sleep(60)
    return 1.0

def trl(completions, level, **columns):
    assert columns["prompts"] == ["1+1="] * len(completions), columns
    if completions[0] == "short": return [1.0]
    return [None if text == "none" else len(text) / level[i] for i, text in enumerate(completions)]

async def trl_async(prompts, completions):
    await asyncio.sleep(0.01)
    return [float(c[0]["content"] == "2") for c in completions]
"""


@pytest.fixture(scope="module")
def box():
    with Sandbox(timeout_s=1.0) as box:
        yield box


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(SOURCE)
    return str(path)


def function(file, name, signature="verl"):
    read = RewardFunction.read(RewardConfig(file, name, signature))
    assert read is not None
    return read


def items(*responses, prompt="1+1="):
    extra = {"index": 7, "level": 2, "prompt": prompt}
    return [{"data_source": "d", "response": text, "ground_truth": "2", "extra_info": extra, "row_id": 1} for text in responses]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("2", 1.0),
        ("3", 0.0),
        ("dict", 0.25),
        ("acc", (-1.0, 1.0)),
        ("raise", "error: KeyError: 'gone'"),
        ("nan", "error: the reward function returned nan"),
        ("text", "error: the reward function returned '1.0', which is no number"),
        ("hang", "timeout: no score within 1 s"),
    ],
)
def test_verl_signature(box, file, response, expected):
    assert box.score(function(file, "verl"), items(response)) == [expected]


def test_async_calls_wait_together_and_fail_alone(box, file):
    own = function(file, "slow")
    responses = items(*["ok"] * 20, "hang", "raise")
    (batch,) = own.batches(responses)
    scores = box.score(own, [responses[i] for i in batch])
    assert scores[:20] == [1.0] * 20
    assert scores[20] == "error: the reward function took too long"
    assert scores[21] == "error: the reward function raised KeyError('gone')"


def test_an_async_item_that_blocks_loses_itself_alone(file):
    """It holds up the event loop, so the others of its batch are called again, each alone."""
    own = function(file, "blocking")
    pool = SandboxPool(1, timeout_s=1.0, memory_gib=4.0)
    try:
        (scores,) = asyncio.run(pool.score([(own, items("ok", "block", "ok", "ok"))], deadline_s=30.0))
    finally:
        pool.close()
    assert scores == [1.0, "timeout: no score within 1 s", 1.0, 1.0]


def test_trl_signature_takes_a_group_at_once_and_may_abstain(box, file):
    own = function(file, "trl", "trl")
    assert own.batches([{"row_id": 1}, {"row_id": 2}, {"row_id": 1}]) == [[0, 2], [1]]
    assert box.score(own, items("aa", "none", "a")) == [1.0, "error: the reward function abstained (None)", 0.5]
    short = "error: the reward function returned 1 rewards for 2 completions"
    assert box.score(own, items("short", "a")) == [short, short]


def test_trl_messages_and_async(box, file):
    assert box.score(function(file, "trl_async", "trl"), items("2", "3", prompt=[{"role": "user", "content": "1+1="}])) == [
        1.0,
        0.0,
    ]


def test_it_is_looked_for_before_anything_starts(tmp_path, file):
    with pytest.raises(ValueError, match="no such file"):
        RewardFunction.read(RewardConfig(str(tmp_path / "none.py"), "f", "verl"))
    with pytest.raises(ValueError, match="no such function; it has verl"):
        RewardFunction.read(RewardConfig(file, "verll", "verl"))
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"broken\.py, line 1"):
        RewardFunction.read(RewardConfig(str(tmp_path / "broken.py"), "f", "verl"))
    with pytest.raises(ValueError, match="go together"):
        RewardConfig(file, None, "verl")
    with pytest.raises(ValueError, match="use one of verl, trl"):
        RewardConfig(file, "verl", "slime")
    assert RewardFunction.read(RewardConfig(None, None, "verl")) is None


def test_a_function_may_import_what_lies_beside_it(tmp_path):
    """Also where the sandbox was started before its first score, as the judge does."""
    (tmp_path / "beside.py").write_text("WORTH = 0.25")
    (tmp_path / "mine.py").write_text("def score(*_, **__):\n    import beside\n    return beside.WORTH")
    own = function(str(tmp_path / "mine.py"), "score")
    pool = SandboxPool(1, timeout_s=2.0, memory_gib=4.0)
    try:
        asyncio.run(pool.missing(own))
        assert asyncio.run(pool.score([(own, items("x"))], deadline_s=30.0)) == [[0.25]]
    finally:
        pool.close()
    with Sandbox(timeout_s=2.0) as box:
        box.start()  # for verifiers
        assert box.score(own, items("x")) == [0.25]


TYPED = """
def score(data_source, solution_str, ground_truth, extra_info):
    if isinstance(ground_truth, int): return float(int(solution_str) == ground_truth)
    if isinstance(ground_truth, list): return float(solution_str in ground_truth)
    return float(solution_str in ground_truth["target"] and extra_info == {"at": (1, 2)})
"""


@pytest.mark.parametrize(
    ("truth", "response", "reward"),
    [(42, "42", 1.0), (42, "41", 0.0), (["Paris"], "a", 0.0), (["Paris"], "Paris", 1.0), ({"target": ["Paris"]}, "Paris", 1.0)],
)
def test_truths_arrive_as_the_row_has_them(tmp_path, truth, response, reward):
    (tmp_path / "typed.py").write_text(TYPED)
    item = {"data_source": "qa", "response": response, "ground_truth": truth, "extra_info": {"at": (1, 2)}}
    with Sandbox(timeout_s=5.0) as own:
        assert own.score(function(str(tmp_path / "typed.py"), "score"), [item]) == [reward]
