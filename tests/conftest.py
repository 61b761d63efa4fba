"""Shared parts: configurations as a user would compose them, a random tiny model, one Ray cluster for the session."""

import functools
import os
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no new cluster by a judge handle's thread after the last test
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin for each other starve on a busy machine

import hypothesis
import pytest

from pipelines.config.compose import compose, resolved
from pipelines.config.run import ASSETS, RunConfig, build

SHARED_DATA = Path(__file__).parents[2] / "shared/data"  # public data beside the project; tests that want it skip without it
TINY = str(ASSETS / "tiny")

hypothesis.settings.register_profile("untimed", deadline=None)  # machines are busy; time decides nothing here
hypothesis.settings.load_profile("untimed")


@functools.cache
def configure(*overrides: str) -> RunConfig:
    """The run that `python -m pipelines.train *overrides` would start."""
    return build(resolved(compose(list(overrides))))


@functools.cache
def _empty_store() -> bytes:
    import mlflow

    with tempfile.TemporaryDirectory() as folder:
        mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return (Path(folder) / "mlflow.db").read_bytes()


def new_store(folder: Path) -> str:
    """The URI of the MLflow store in a folder; one that is not there yet is a copy, as making its tables takes a second."""
    folder.mkdir(exist_ok=True)
    file = folder / "mlflow.db"
    if not file.exists():
        file.write_bytes(_empty_store())
    return f"sqlite:///{file}"


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return configure()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an untrained tiny model and its tokenizer."""
    from pipelines.data.tiny_model import build_model, build_tokenizer

    folder = str(tmp_path_factory.mktemp("model"))
    build_model(seed=3).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ray_cluster(config: RunConfig):
    """A local Ray cluster, as the CPU configuration starts it."""
    import ray

    from pipelines.command import cluster

    cluster.connect(config.ray)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def joined(ray_cluster):
    """Commands join the session's cluster, as those of `ray job submit` do: one of their own costs some seconds each."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield
