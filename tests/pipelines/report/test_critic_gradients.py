"""The critic's gradients by response: against a plain computation, and the page they make."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from algorithms.ppo import PPOCredit
from pipelines.report.__main__ import main
from pipelines.report.critic_gradients import SCALES, Pulls, by_bin, gradient_norm, measure
from pipelines.rollout import schema
from pipelines.trainer.value_folder import HEAD
from tests.conftest import new_store
from tests.learner_parts import make_groups
from tests.pipelines.trainer.test_ppo_learner import value_folder
from tests.reference.ppo import outputs_of


@pytest.fixture(scope="module")
def checkpoint(random_model: str, tmp_path_factory):
    """A checkpoint's critic, and the rollouts of its step where a run leaves them."""
    run = tmp_path_factory.mktemp("run")
    path = run / "checkpoints" / "step_000003"
    path.mkdir(parents=True)
    value_folder(path / "critic", random_model, 1)
    wanted = schema.credited(PPOCredit)
    rows = [{name: group.get(name) for name in wanted.names} for group in make_groups()]
    (run / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=wanted), run / "rollouts" / "step_000003.parquet")
    return path


def test_norms_are_those_of_each_responses_share_of_the_batch(checkpoint):
    pulls = measure(checkpoint, checkpoint.parent.parent / "rollouts" / "step_000003.parquet").at_floor(0.25)
    backbone = AutoModel.from_pretrained(checkpoint / "critic", dtype=torch.float32)
    head = nn.Linear(backbone.config.hidden_size, 1)
    head.load_state_dict(load_file(str(checkpoint / "critic" / HEAD)))
    judged = [
        (g["prompt_ids"] + g["prefix_ids"], response, reward)
        for g in make_groups()
        for response, reward in zip(g["response_ids"], g["reward"], strict=True)
        if reward is not None
    ]
    tokens = sum(len(response) for _, response, _ in judged)
    for (prompt, response, reward), found in zip(judged, pulls.norm, strict=True):
        loss = sum(0.5 * (v - reward) ** 2 for v in outputs_of(backbone, head, prompt, response)[:, 0]) / tokens
        gradients = torch.autograd.grad(loss, [*backbone.parameters(), *head.parameters()])
        assert found == pytest.approx(float(sum((g**2).sum() for g in gradients)) ** 0.5, rel=1e-4)
    assert pulls.left_out == 1
    stds = [np.std([r for r in g["reward"] if r is not None]) for g in make_groups()]
    sizes = [sum(r is not None for r in g["reward"]) for g in make_groups()]
    np.testing.assert_allclose(pulls.std, np.repeat(stds, sizes))
    inverse = 1 / np.maximum(stds, 0.25)
    np.testing.assert_allclose(pulls.weighted, pulls.norm * np.repeat(inverse / inverse.mean(), sizes))


def test_intervals_are_closed_on_the_right_with_zero_in_the_first():
    std = np.array([0.0, 0.05, 0.0500001, 0.3, 0.31])
    found = by_bin(std, np.arange(5), np.linspace(0, 0.3, 7))
    assert [part.tolist() for part in found] == [[0, 1], [2], [], [], [], [3, 4]]


def test_the_page_and_what_cannot_be_diagnosed(checkpoint, random_model, tmp_path, capsys):
    uri = f"uri={new_store(tmp_path)}"
    assert main(["critic_gradients", f"checkpoints={checkpoint},{checkpoint}", f"out={tmp_path}/page.html", uri, "like=aime"]) == 0
    assert (tmp_path / "page.html").read_text().count("data:image/png;base64,") == 2
    assert "weighted slope" in capsys.readouterr().out
    assert main(["critic_gradients", f"checkpoints={checkpoint}", "like=math", uri]) == 2
    assert "like=math: use frontiercs or aime" in capsys.readouterr().err
    assert main(["critic_gradients", uri]) == 2
    assert main(["critic_gradients", f"checkpoints={random_model}", uri]) == 2
    assert "name other rollouts with rollouts=FILE" in capsys.readouterr().err
    rollouts = checkpoint.parent.parent / "rollouts" / "step_000003.parquet"
    assert main(["critic_gradients", f"checkpoints={random_model}", f"rollouts={rollouts}", uri]) == 2
    assert "no critic there" in capsys.readouterr().err


def test_scales_of_the_papers_figures_are_parts_of_the_reward_range():
    """AIME: rewards of -1 and 1, floor 0.5, four bins over [0, 1]."""
    pulls = Pulls("step 30", np.array([0.0, 1.0]), np.array([0, 1]), np.ones(2), 0.25, 0, (-1.0, 1.0))
    aime = SCALES["aime"]
    assert pulls.at_floor(aime.floor).floor == 0.5
    assert (aime.widest * pulls.range, aime.bins) == (1.0, 4)
    np.testing.assert_allclose(pulls.at_floor(aime.floor).weighted, [2 / 1.5, 1 / 1.5])  # 1 / max(std, 0.5), with a mean of one


def test_parameters_that_the_value_does_not_touch_have_no_part_in_the_norm():
    used, unused = torch.tensor([3.0, 4.0], requires_grad=True), torch.ones(2, requires_grad=True)
    assert gradient_norm((used.square() / 2).sum(), [used, unused]) == 5.0
