"""Which steps' groups stay on disk."""

import pyarrow as pa

from pipelines.store.rollouts import PROBED, write_rollouts


def kept(folder):
    return sorted(int(path.stem.removeprefix("step_")) for path in (folder / "rollouts").iterdir())


def test_the_newest_stay_and_those_that_a_named_checkpoint_is_asked_about(tmp_path):
    last = PROBED + 30
    for step in range(1, last + 1):
        write_rollouts(str(tmp_path), step, pa.table({"a": [step]}), keep=2, after=(3, 10))
    assert kept(tmp_path) == [*range(4, 10 + PROBED + 1), last - 1, last]
