"""The judge as it runs: by handle in batches, over HTTP for people, and never a 0 that no verifier gave."""

import dataclasses
import itertools
import json
import stat
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from reasoning_gym.factory import create_dataset

from pipelines.rollout.stages import _ask_judge
from serve import judge
from serve.scoring import Scoring
from tests.conftest import configure
from tests.distributed import free_port
from tests.hostile.test_answers import ENDLESS, PAYLOADS

pytestmark = pytest.mark.engine

SLOW = "\\boxed{" + "+".join(f"x_{{{i}}}" for i in range(600)) + "}"  # no bound foresees everything


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    return tmp_path_factory.mktemp("judge") / judge.TOKEN_FILE


@pytest.fixture(scope="module")
def settings(ray_cluster, token_file):
    config = dataclasses.replace(configure().judge, http_port=free_port(), verifier_timeout_s=3)
    judge.start(config, Scoring(), token_file.parent)
    return config


def item(response, source="chain_arithmetic", truth="33"):
    return {"data_source": source, "response": response, "ground_truth": truth, "extra_info": {}}


def call(settings, path, body=None, token=""):
    request = urllib.request.Request(f"http://127.0.0.1:{settings.http_port}{path}")
    if body is not None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(request.full_url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def refusal(*arguments):
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(*arguments)
    return caught.value.code, caught.value.read().decode()


BODY = {"data_source": "chain_arithmetic", "response": "#33", "ground_truth": "33"}


def test_batches_keep_their_order_and_failures_are_null(settings):
    items = [item("#33"), item("#34"), item("x", source="unheard_of"), item("\\boxed{33}", source="math"), item("1", "math", "")]
    verdicts = _ask_judge(items, settings)
    assert [v["reward"] for v in verdicts] == [1.0, 0.0, None, 1.0, None]
    assert [v["status"].partition(":")[0] for v in verdicts] == ["ok", "ok", "error", "ok", "error"]
    assert "no verifier" in verdicts[2]["status"]


def test_over_http_with_the_runs_token(settings, token_file):
    assert call(settings, "/healthz") == {"status": "ok"}
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert call(settings, "/score", BODY, token_file.read_text()) == {"reward": 1.0, "acc": 1.0, "status": "ok"}
    assert "/score" in call(settings, "/openapi.json")["paths"]
    for wrong in ("", "guess", token_file.read_text()[:-1]):
        status, reason = refusal(settings, "/score", BODY, wrong)
        assert status == 401
        assert "Authorization: Bearer TOKEN" in reason


def test_a_body_that_is_too_long_is_refused(settings, token_file):
    status, reason = refusal(settings, "/score", BODY | {"response": "3" * 3_000_000}, token_file.read_text())
    assert (status, "at most 1048576 bytes" in reason) == (413, True)


def test_people_do_not_hold_up_training(settings, token_file):
    """A slow question over HTTP has a sandbox of its own."""
    slow = {"data_source": "math", "response": SLOW, "ground_truth": "2"}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(call, settings, "/score", slow, token_file.read_text()) for _ in range(2)]
        time.sleep(0.5)
        start = time.monotonic()
        assert [v["reward"] for v in _ask_judge([item("\\boxed{33}", "math")] * 4, settings)] == [1.0] * 4
        took = time.monotonic() - start
        assert not any(one.done() for one in asked) or took < 1.0
        assert {one.result()["status"].partition(":")[0] for one in asked} == {"timeout"}


def test_slow_answers_lose_themselves_alone(settings):
    """The cases that were seen: eight of 38 took for ever, and all 38 and the next batch were lost; 13 before 115 right ones."""
    for slow in (range(0, 38, 5), range(13)):
        items = [item(SLOW if i in slow else "\\boxed{33}", "math") for i in range(38 if slow.step > 1 else 128)]
        verdicts = _ask_judge(items, settings)
        assert [v["reward"] for v in verdicts] == [None if i in slow else 1.0 for i in range(len(items))]
        assert all(verdicts[i]["status"].startswith("timeout") for i in slow)


def test_a_thousand_hostile_responses_lose_no_good_verdict(settings):
    hostile = [("math", text) for _, _, text in list(ENDLESS.values())[:8]]
    entry = create_dataset("countdown", size=1, seed=1)[0]
    hostile += [("reasoning_gym/countdown", f"<answer>{payload}</answer>") for payload in PAYLOADS.values()]
    extra = {"entry": entry}
    items = [item(text, source) | {"extra_info": extra} for source, text in itertools.islice(itertools.cycle(hostile), 1000)]
    good = [item("\\boxed{33}", "math"), item("#33"), item(f"<answer>{entry['answer']}</answer>", "reasoning_gym/countdown")]
    for i in range(99):
        items.insert(11 * i, good[i % 3] | {"extra_info": extra})
    verdicts = _ask_judge(items, dataclasses.replace(settings, request_timeout_s=300))
    assert [verdicts[11 * i] for i in range(99)] == [{"reward": 1.0, "acc": 1.0, "status": "ok"}] * 99
    assert all(not v["reward"] or v["reward"] == 0.01 for i, v in enumerate(verdicts) if i % 11 or i >= 99 * 11)


def test_a_deadline_keeps_what_is_done_and_gives_up_the_rest(settings):
    hurried = dataclasses.replace(settings, request_timeout_s=8.0, verifier_timeout_s=0.001)  # the running judge's clock is longer
    verdicts = _ask_judge([item("\\boxed{33}", "math"), *[item(SLOW, "math")] * 30], hurried)
    assert verdicts[0] == {"reward": 1.0, "acc": 1.0, "status": "ok"}
    assert {v["status"].partition(":")[0] for v in verdicts[1:]} == {"timeout"}
    assert _ask_judge([item("\\boxed{33}", "math")], settings)[0]["reward"] == 1.0


def test_a_judge_that_does_not_answer_gives_null_with_a_status(settings):
    hurried = dataclasses.replace(settings, request_timeout_s=0.0001, verifier_timeout_s=1e-6, retries=1)
    assert {v["reward"] for v in _ask_judge([item("#33")] * 3, hurried)} == {None}
    assert "no answer within" in _ask_judge([item("#33")], hurried)[0]["status"]


def test_a_proxy_that_comes_up_slowly_is_not_killed(ray_cluster):
    """Serve's controller kills one after five seconds by default, and the driver that waits for it then ends with an error."""
    import ray

    @ray.remote(num_cpus=0)
    def patience() -> float:
        from ray.serve._private.constants import PROXY_READY_CHECK_TIMEOUT_S

        return PROXY_READY_CHECK_TIMEOUT_S

    assert ray.get(patience.remote(), timeout=60) >= 60
