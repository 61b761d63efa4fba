"""Each figure and table of both papers, from real MLflow stores; and what the listing says of those that lack material."""

import json
import re

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.config.compose import compose, resolved
from pipelines.report import paper_easyppo_settings
from pipelines.report.__main__ import main
from pipelines.report.cost import hours_against_flops
from pipelines.report.curves import centred
from pipelines.report.page import Page
from pipelines.report.paper_ac2 import EXHIBITS as AC2
from pipelines.report.paper_ac2 import SETTINGS, standing_for
from pipelines.report.paper_easyppo import EXHIBITS as EASYPPO
from pipelines.report.paper_easyppo import first_nonnegative
from pipelines.report.probes import GroupFolder
from pipelines.report.runs import Configuration, Run, configurations_by_task
from pipelines.store.tracker import flatten
from tests.pipelines.report.test_critic_gradients import checkpoint  # noqa: F401  (a fixture)
from tests.pipelines.report.test_report import ROWS

FILES = ("model.path=m", "task.train.files=[a.parquet]", "task.validation.files=[b.parquet]")


def test_smoothing_by_hand():
    """EasyPPO section 5: the mean over five steps, two on either side."""
    assert centred(np.array([1.0, 2, 3, 4, 10])).tolist() == [2, 2.5, 4, 4.75, 17 / 3]


def test_the_first_nonnegative_step_is_of_unsmoothed_values():
    steps = np.array([3, 4, 5])
    assert first_nonnegative(steps, np.array([-1.0, 0.0, -2.0])) == 4
    assert first_nonnegative(steps, np.array([-1.0, -0.1, -2.0])) is None


def test_each_listed_setting_is_a_parameter_of_the_papers_presets():
    ac2 = flatten(resolved(compose(["experiment=ac2_paper", *FILES])))
    assert [name for name in SETTINGS.values() if name not in ac2] == []
    for experiment in ("frontiercs", "aime", "search_r1"):
        known = flatten(resolved(compose([f"experiment={experiment}", "algorithm=hl_gauss_ppo", *FILES])))
        tables = [getattr(paper_easyppo_settings, name) for name in dir(paper_easyppo_settings) if name.isupper()]
        assert len(tables) == 7
        assert [name for table in tables for name in table.values() if name not in known] == []


def test_a_checkpoint_stands_for_the_papers_step_or_for_its_place():
    folders = [GroupFolder("", "continue", step, []) for step in (20, 10, 40)]
    assert [standing_for(folders, step).step for step in (40, 57, 80, 160)] == [40, 10, 20, 40]
    assert standing_for(folders[:1], 160).step == 20


def test_device_hours_count_the_checkpoint_and_leave_the_first_step_out():
    """Three GPUs; step 2 takes 60 s and its checkpoint 48 s: 3 x 108 / 3600 = 0.09 hours."""
    seconds = {"timing_s/step": {1: 900.0, 2: 60.0, 3: 72.0, 4: 84.0}, "timing_s/save_checkpoint": {2: 48.0}}
    flops = {"decode/flops": {1: 9e12, 2: 3e12, 3: 1e12, 4: 2e12}}
    engines = {"cluster.engines.count": "1", "cluster.engines.num_gpus": "1", "cluster.engines.tensor_parallel_size": "1"}
    run = Run("", "", engines | {"cluster.learner.ranks": "2", "cluster.learner.num_gpus": "1"}, seconds | flops)
    page = Page("")
    assert hours_against_flops(page, [Configuration("ac2", [run])], "hours")
    # Points (3, 0.09), (1, 0.06), (2, 0.07): slope 0.015, mean 0.22 / 3 at 2, so 0.0433 at nought.
    assert re.search(r"ac2 +3 +4\.33e-02 +1\.50e-02 +0\.982", page.tables["hours"])
    assert not hours_against_flops(page, [Configuration("ac2", [])], "none")


def log(uri, experiment, algorithm, metrics, seed=0, **params):
    """A run as training leaves it: parameters, and metrics that are lists by step from 0."""
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(experiment)
    with mlflow.start_run():
        mlflow.log_params({"algorithm.name": algorithm, "seed": seed, "task.name": experiment} | params)
        for step in range(6):
            mlflow.log_metrics({name: values[step] for name, values in metrics.items() if values[step] is not None}, step=step)


def scores(final, sources=()):
    evaluated = [0.1, None, None, (0.1 + final) / 2, None, final]
    found = {"val-core/mean/acc/mean_at_4": evaluated, "val-core/mean/acc/best_at_4/mean": evaluated}
    found |= {f"val-core/{source}/acc/mean_at_4": evaluated for source in sources}
    spent = {"decode/flops": [None, 2e12, 3e12, 1e12, 2e12, 4e12], "decode/flops_total": [0.0, 2e12, 5e12, 6e12, 8e12, 12e12]}
    spent["decode/flops_from_means"] = [None, 2e12, 2.5e12, 1e12, 2e12, 3.9e12]
    return found | spent | {"timing_s/step": [None, 9.0, 3.0, 2.0, 3.0, 4.0], "timing_s/save_checkpoint": [None, *[1.0] * 5]}


def rising(start, end):
    return [None, *np.linspace(start, end, 5).tolist()]


def folder(path, mode, step, change):
    path.mkdir()
    pq.write_table(pa.Table.from_pylist([row | change for row in ROWS]), path / "groups-00000.parquet")
    (path / "replay.json").write_text(json.dumps({"mode": mode, "checkpoint": "c", "step": step, "fingerprint": "f"}))
    return str(path)


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """AC2 and variants on one task, and GRPO at two learning rates."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    own = {"ac2/critic_mae": rising(0.3, 0.1), "ac2/audit_mae": rising(0.3, 0.2), "ac2/ready_fraction": rising(0, 0.8)}
    for i, name in enumerate(("ac2", "ac2_no_group", "ac2_no_local_readiness", "ac2_no_audit", "ac2_short_chunks")):
        log(uri, "walk", name, scores(0.5 + i / 20) | own)
    log(uri, "walk", "prefix_grpo", scores(0.4))
    for rate in ("1e-06", "2e-06"):
        log(uri, "walk", "grpo", scores(0.45), **{"optimizer.lr": rate})
    return uri


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """EasyPPO and what it is compared with on two tasks."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    own = {"response_length/clip_ratio": rising(0.1, 0.9), "critic/score/completed_mean": rising(0.5, 0.6)}
    own |= {"critic/score/mean": rising(0.3, 0.1), "critic/grad_norm": rising(1, 9)}
    for task, sources in (("chains", ()), ("aime", ("aime24", "aime25"))):
        for i, name in enumerate(("ppo", "ppo_joint_filter", "ppo_actor_filter", "hl_gauss_ppo", "vapo", "easyppo")):
            variance = {"critic/vf_explained_var": rising(-2 + i / 5, 0.2 + i / 10)}
            settings = {"algorithm.critic.minibatches": 4, "algorithm.critic.noise_normalization": name == "easyppo"}
            for seed in range(2 if name in ("easyppo", "ppo_actor_filter") else 1):
                started = settings | {"algorithm.critic.head_seed": seed}
                log(uri, task, name, scores(0.3 + i / 20 + seed / 50, sources) | own | variance, seed, **started)
        never = {"critic/vf_explained_var": rising(-3, -1)}
        log(uri, task, "easyppo", scores(0.2, sources) | own | never, **settings | {"algorithm.critic.minibatches": 1})
    return uri


def listing(uri, out):
    """The table that ends a page, as (exhibit, made or what it needs, file), from the store that the page was logged to."""
    client = mlflow.MlflowClient(uri)
    (newest, *_) = client.search_runs([client.get_experiment_by_name("reports").experiment_id])
    text = mlflow.artifacts.load_text(f"{newest.info.artifact_uri}/tables/exhibits.txt")
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()[1:]]
    for _, remark, *files in rows:
        assert remark.startswith("made") == bool(files)
        assert all((out.parent / file).is_file() for file in files)
    return {name: remark for name, remark, *_ in rows}


def test_the_figures_and_tables_of_ac2(walk, tmp_path, capsys):
    groups = [
        folder(tmp_path / "one", "continue", 10, {}),
        folder(tmp_path / "two", "continue", 80, {"value": 0.4}),
        folder(tmp_path / "seen", "probe", 10, {}),
    ]
    out = tmp_path / "ac2.html"
    arguments = ["paper", "paper=ac2", "experiment=walk", f"uri={walk}", f"out={out}"]
    assert main([*arguments, f"groups={','.join(groups)}"]) == 0
    found = listing(walk, out)
    assert (
        list(found)
        == [exhibit.name for exhibit in AC2]
        == [f"Figure {i}" for i in range(1, 20)] + [f"Table {i}" for i in range(1, 5)]
    )
    assert [name for name, remark in found.items() if not remark.startswith("made")] == []
    assert found["Figure 1"] == found["Figure 2"] == "made"
    assert found["Figure 4"] == "made"
    assert found["Figure 9"] == "made; the best of 4, for the runs evaluate no 16 responses"
    assert found["Figure 12"] == "made; step 10 for the paper's 40, step 10 for the paper's 57"
    assert "ac2_stale" in found["Figure 3"]
    printed = capsys.readouterr().out
    assert re.search(r"ac2 +joint lengths +5 +12\.000 +11\.400 +0\.600 +-5\.00%", printed)  # equations 7 and 8
    assert main(arguments) == 0
    bare = listing(walk, out)
    assert bare["Figure 2"] == "made; without the fourth panel, which needs groups of pipelines.replay mode=probe"
    needs = "needs groups of pipelines.replay of a checkpoint"
    assert {name for name, remark in bare.items() if remark == needs} == {
        "Figure 4",
        *(f"Figure {i}" for i in range(10, 19)),
        "Table 1",
        "Table 2",
    }


def test_the_figures_and_tables_of_easyppo(graded, checkpoint, tmp_path):  # noqa: F811
    out = tmp_path / "easyppo.html"
    arguments = ["paper", "paper=easyppo", f"uri={graded}", f"out={out}"]
    assert main([*arguments, "experiment=chains,aime", f"checkpoints={checkpoint}"]) == 0
    found = listing(graded, out)
    assert [name for name in found if name != "Seed comparison"] == [f"Figure {i}" for i in range(1, 15)] + [
        f"Table {i}" for i in range(1, 9)
    ]
    assert list(found) == [exhibit.name for exhibit in EASYPPO]
    lacking = {name: remark for name, remark in found.items() if not remark.startswith("made")}
    needs = "needs checkpoints with a value model, of a run with graded rewards"
    assert lacking == {"Figure 3": needs, "Figure 11": needs}
    assert found["Figure 10"] == "made; of step 3"
    assert found["Figure 7"] == "made; 2 runs never reach zero"
    assert found["Figure 14"] == "made; on aime"
    assert main([*arguments, "experiment=chains"]) == 0
    alone = listing(graded, out)
    assert alone["Figure 8"] == alone["Figure 13"] == "needs runs on another task than chains"
    assert alone["Figure 14"] == "needs runs that validate on several data sources"


def test_runs_of_two_tasks_are_no_one_figure_of_ac2(graded, capsys):
    assert main(["paper", "paper=ac2", "experiment=chains,aime", f"uri={graded}"]) == 2
    assert "runs on chains and aime: the figures of ac2 compare runs on one task" in capsys.readouterr().err
    assert main(["paper", "paper=vapo", "experiment=chains", f"uri={graded}"]) == 2
    assert "paper=vapo: use ac2 or easyppo" in capsys.readouterr().err


def test_seeds_and_heads_are_one_configuration_and_tasks_are_not():
    params = {"algorithm.name": "easyppo", "task.name": "a"}
    runs = [
        Run("", "", params | {"algorithm.critic.head_seed": str(i), "seed": str(i)}, {"critic/vf_explained_var": {1: 0.0}})
        for i in (0, 1)
    ]
    found = configurations_by_task([*runs, Run("", "", params | {"task.name": "b"}, {})])
    assert {task: [len(one.runs) for one in members] for task, members in found.items()} == {"a": [2], "b": [1]}
    assert len(found["a"][0].critic_initializations()) == 2
    assert found["b"][0].critic_initializations() == set()
