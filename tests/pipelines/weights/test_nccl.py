"""What the NCCL backend asks of the engines; the transfer itself needs GPUs."""

import dataclasses
from types import SimpleNamespace

import pytest

from pipelines.engines.pool import EngineError
from pipelines.weights.nccl import PoolClient
from tests.conftest import configure


class Pool:
    """Three engines of two workers that write down what they are asked."""

    def __init__(self, confirms=7):
        self.actors, self.config = [None] * 3, SimpleNamespace(tensor_parallel_size=2)
        self.asked, self.confirms = [], confirms

    def transfer(self, method, arguments=None):
        self.asked.append((method, arguments))

    def finish_transfer(self, version):
        return [{"version": version}, {"version": version}, {"version": self.confirms}]


def test_workers_of_all_engines_follow_the_sender_in_one_group():
    pool = Pool()
    client = PoolClient(pool)
    assert client.world_size == 7
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7, "master_port": 5})
    ((method, arguments),) = pool.asked
    assert method == "init_weight_transfer_engine"
    assert [one["rank_offset"] for one in arguments] == [1, 3, 5]
    assert {(one["world_size"], one["master_port"]) for one in arguments} == {(7, 5)}


def test_a_version_that_one_engine_does_not_confirm_is_an_error():
    client = PoolClient(Pool(confirms=6))
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.version = 7
    with pytest.raises(EngineError, match="version 7 was confirmed as"):
        client.finish_weight_update()
    client.version = 6
    client.finish_weight_update()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_sync": "rdma"}, "use checkpoint or nccl"),
        ({"weight_sync": "nccl"}, "needs engines on GPUs"),
        ({"weight_sync": "nccl", "num_gpus": 1.0, "max_restarts": 3}, "max_restarts=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(configure().engines, **changes)
