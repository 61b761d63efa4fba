"""Reports: the numbers by hand, and pages from a real MLflow store."""

import mlflow
import numpy as np
import pytest

from pipelines.report.__main__ import main
from pipelines.report.compare import crossing
from pipelines.report.curves import least_squares, trailing
from pipelines.report.probes import by_f, centred, probes, sample_counts, values_by_prompt
from pipelines.report.runs import configurations, label, read_runs


def test_a_crossing_by_hand():
    """The paper's: a peak of 18.50% at 1.99e20 FLOPs, first exceeded at 0.79e20, is 2.5 times less."""
    scores, flops = np.array([0.20, 0.15, 0.1851, 0.20]), np.array([0.0, 0.5e20, 0.79e20, 1e20])
    found = crossing(scores, flops, np.array([0, 60, 90, 100]), peak=0.185, peak_flops=1.99e20)
    assert found is not None  # the start does not count
    assert (found.step, round(found.ratio, 2)) == (90, 2.52)
    assert crossing(scores, flops, np.arange(4), peak=0.2, peak_flops=1e20) is None  # to reach is not to pass


def test_lines_and_means_by_hand():
    slope, intercept, r = least_squares(np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0, 5.0]))
    assert (slope, intercept, r) == pytest.approx((2, 1, 1))
    assert trailing(np.array([1.0, 2, 3, 4, 5, 6])).tolist() == [1, 1.5, 2, 2.5, 3, 4]


def group(rewards, probed, answers, value, informed=None, informed_answers=None):
    return {
        "reward": rewards,
        "probed": probed,
        "probe_value": answers,
        "probe_value_with_reference": informed_answers or [None] * len(rewards),
        "value": value,
        "value_with_reference": informed,
        "reference_ids": None if informed is None else [1],
    }


ROWS = [
    group([1.0, 0.0], [False, False], [None, None], 0.5),  # f = 0: v is r
    group([1.0, 0.0], [True, False], [0.6, None], 0.9),  # v = 0.6, 0
    group([1.0, 1.0], [True, True], [0.1, 0.1], None, 0.7, [0.8, 0.6]),  # with its reference: v = 0.8, 0.6
    group([None, 1.0], [True, True], [0.5, None], 0.5),  # one without a reward, one without a value: nothing is left
]


def test_critic_diagnostics_by_hand():
    found, left_out = probes(ROWS)
    assert (len(found), left_out) == (3, {"without a reward": 1, "without a value": 1})
    assert by_f(found) == [
        ["all", 3, pytest.approx((0 + 0.2 + 0.3) / 3), pytest.approx((0 - 0.2 - 0.3) / 3)],
        ["f = 0", 1, 0.0, 0.0],
        ["0 < f < 1", 1, pytest.approx(0.2), pytest.approx(-0.2)],
        ["f = 1", 1, pytest.approx(0.3), pytest.approx(-0.3)],
    ]
    assert centred(found) == pytest.approx(np.array([[0.3, 0.5], [-0.3, -0.5], [0.1, 0.0], [-0.1, 0.0]]))
    means, advantages, individual = sample_counts(found)
    assert (means[1], means[2]) == (1, pytest.approx(0.3))
    assert (advantages[1], advantages[2]) == (4, pytest.approx((0.2 + 0.2 + 0.1 + 0.1) / 4))
    assert (individual[1], individual[2]) == (3, pytest.approx((0.4 + 0.2 + 0.4) / 3))
    plain, _, informed = values_by_prompt(found)
    assert plain[:4] == ["without reference", 3, 1, pytest.approx((0.0 + 0.4 + 1.0) / 3)]  # an invalid answer is an error of 1
    assert informed[:4] == ["with reference", 1, 0, pytest.approx(0.3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """Two seeds of one configuration and one run of each of two others, with the metrics that training logs."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("pair")
    runs = (("grpo-0", 0, 10e12, 0.8), ("grpo-1", 1, 10e12, 0.9), ("ac2-0", 0, 4e12, 0.95), ("easyppo-0", 0, 5e12, 0.7))
    for name, seed, flops, final in runs:
        with mlflow.start_run():  # named at random
            mlflow.log_params({"algorithm.name": name[:-2], "seed": seed, "tracking.run_name": name, "cluster.learner.ranks": 2})
            for step, (score, spent) in enumerate(((0.3, None), (0.5, flops / 2), (final, flops))):
                values = {"val-core/mean/acc/mean_at_4": score, "val-core/mean/acc/best_at_4/mean": min(1, score + 0.1)}
                # One source is no better than the other's peak where the mean is.
                values |= {"val-core/a/acc/mean_at_4": score / 2, "val-core/b/acc/mean_at_4": score * 1.5}
                values |= (
                    {} if spent is None else {"decode/flops_total": spent, "decode/flops": flops / 2, "timing_s/step": 5.0 + step}
                )
                values |= {"critic/vf_explained_var": step / 3, "critic/grad_norm": 1.0} if name == "easyppo-0" else {}
                values |= {"ac2/critic_mae": 0.3 - step / 10, "ac2/ready_fraction": step / 2} if name == "ac2-0" else {}
                mlflow.log_metrics(values, step=step)
    return uri


def test_seeds_of_one_configuration_are_found_together(store):
    found = configurations(read_runs(store, "pair", []))
    assert [(one.label, len(one.runs)) for one in found] == [("grpo", 2), ("ac2", 1), ("easyppo", 1)]
    assert found[0].at_evaluations().tolist() == [[0.3, 0.5, 0.8], [0.3, 0.5, 0.9]]


def test_a_comparison_from_a_real_store(store, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["compare", "experiment=pair", f"uri={store}", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "2.50x" in printed  # 10 against 4 TFLOP
    assert "0.850" in printed
    assert "at the peak of the mean" in printed
    assert "0.425" in printed
    assert "1.275" in printed
    assert out.read_text().count("data:image/png;base64,") == 3  # score and both kinds of critic; a line of costs needs more steps
    assert "Rollouts and the critic model" in out.read_text()
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("reports").experiment_id])
    assert {a.path for a in client.list_artifacts(run.info.run_id)} == {"page.html", "figures", "tables"}


def test_labels_say_what_differs_and_nothing_else():
    common = {"algorithm.self_critic.lr": "1", "algorithm.lr": "2", "steps": "60", "task.name": "walk"}
    plain = {"algorithm.name": "grpo", "steps": "60", "task.name": "walk", "algorithm.group_size": "8"}
    ac2 = {"algorithm.name": "ac2"} | common
    assert [label(one, [plain, ac2]) for one in (plain, ac2)] == ["grpo", "ac2"]
    slow, longer = ac2 | {"algorithm.self_critic.lr": "0.3"}, ac2 | {"steps": "80", "algorithm.lr": "3"}
    found = [plain, ac2, slow, longer]
    assert [label(one, found) for one in found] == [
        "grpo steps=60",
        "ac2 algorithm.lr=2 self_critic.lr=1 steps=60",
        "ac2 algorithm.lr=2 self_critic.lr=0.3 steps=60",
        "ac2 algorithm.lr=3 self_critic.lr=1 steps=80",
    ]
    assert label(ac2 | {"algorithm.audit_fraction": "0"}, [ac2, ac2 | {"algorithm.audit_fraction": "0"}]) == "ac2 audit_fraction=0"
    assert label(ac2, [ac2, ac2 | {"algorithm.audit_fraction": "0"}]) == "ac2 audit_fraction=none"


def test_the_baseline_is_found_by_its_algorithm_and_its_absence_is_said(store, tmp_path, capsys):
    compared = ["compare", "experiment=pair", f"uri={store}", f"out={tmp_path}/page.html"]
    assert main([*compared, "baseline=easyppo"]) == 0
    assert "easyppo peaks at" in capsys.readouterr().out
    assert main([*compared, "baseline=vapo"]) == 0
    assert "baseline=vapo is neither an algorithm nor a label here; give one of ac2, easyppo, grpo" in capsys.readouterr().out
    (own,) = (run.run_id for run in read_runs(store, "pair", []) if run.params["algorithm.name"] == "easyppo")
    assert main(["compare", f"runs={own}", f"uri={store}", f"out={tmp_path}/page.html", "baseline=easyppo"]) == 0
    assert "no other configuration to pass it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "experiment=other"], "experiment=other: not in"),
        (["compare"], "give experiment=NAME or runs"),
        (["compare", "experimnt=a"], "compare takes experiment="),
        (["diagnostics", "groups=nowhere"], "no groups there"),
    ],
)
def test_what_cannot_be_reported_is_said_in_a_sentence(store, arguments, message, capsys):
    assert main([*arguments, f"uri={store}"]) == 2
    assert message in capsys.readouterr().err
