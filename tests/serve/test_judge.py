"""The judge as it runs: by handle in batches, over HTTP for people, and never a 0 that no verifier gave."""

import json
import urllib.request

import pytest

from pipelines.rollout.stages import _ask_judge
from serve import judge
from tests.conftest import configure
from tests.distributed import free_port

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def settings(ray_cluster):
    import dataclasses

    config = dataclasses.replace(configure().judge, http_port=free_port())
    judge.start(config)
    return config


def item(response, source="chain_arithmetic", truth="33"):
    return {"data_source": source, "response": response, "ground_truth": truth, "extra_info": "{}"}


def call(settings, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{settings.http_port}{path}")
    if body is not None:
        request = urllib.request.Request(request.full_url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def test_batches_keep_their_order_and_failures_are_null(settings):
    items = [item("#33"), item("#34"), item("x", source="unheard_of"), item("\\boxed{33}", source="math"), item("1", "math", "")]
    verdicts = _ask_judge(items, settings)
    assert [v["reward"] for v in verdicts] == [1.0, 0.0, None, 1.0, None]
    assert [v["status"].partition(":")[0] for v in verdicts] == ["ok", "ok", "error", "ok", "error"]
    assert "no verifier" in verdicts[2]["status"]


def test_over_http(settings):
    assert call(settings, "/healthz") == {"status": "ok"}
    body = {"data_source": "chain_arithmetic", "response": "#33", "ground_truth": "33"}
    assert call(settings, "/score", body) == {"reward": 1.0, "status": "ok"}
    assert "/score" in call(settings, "/openapi.json")["paths"]


def test_a_judge_that_does_not_answer_gives_null_with_a_status(settings):
    import dataclasses

    hurried = dataclasses.replace(settings, request_timeout_s=0.0001, retries=1)
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
