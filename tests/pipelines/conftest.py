"""What the tests of the pipelines share."""

import dataclasses

import pytest

from pipelines.config.run import self_critic_of
from tests.conftest import TINY, configure


@pytest.fixture(scope="package")
def tiny_pool(ray_cluster, tmp_path_factory: pytest.TempPathFactory):
    """Two engines with the shipped model at weights version 3, that may each start again twice; and the folder of their weights."""
    from safetensors.torch import load_file

    from pipelines.engines.pool import EnginePool
    from pipelines.weights.folder import write_current

    with_critic = configure("algorithm=ac2", "task=number_walk")
    queries = self_critic_of(with_critic)
    assert queries is not None
    weights = tmp_path_factory.mktemp("weights")
    config = dataclasses.replace(with_critic.engines, count=2, threads=1, max_restarts=2)
    pool = EnginePool.start(TINY, "float32", queries.context_limit, config, seed=0, weights_dir=str(weights))
    pool.wait_ready()
    pool.load_weights(**write_current(weights, load_file(f"{TINY}/model.safetensors"), version=3))
    yield pool, str(weights)
    pool.stop()
