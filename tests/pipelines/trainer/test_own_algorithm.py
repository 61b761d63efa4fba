"""An algorithm of one's own: a file and a YAML, nothing else, even with an auxiliary loss on the policy."""

from dataclasses import dataclass
from pathlib import Path

from algorithms.grpo import GRPO
from pipelines.config.compose import compose, resolved
from pipelines.config.run import build
from tests.distributed import run_ranks
from tests.learner_parts import credited, make_groups, make_learner, share

YAML = """defaults: [grpo, _self_]
implementation: tests.pipelines.trainer.test_own_algorithm.Cloned
name: cloned
imitation_coef: 0.5
"""


@dataclass(frozen=True, kw_only=True)
class Cloned(GRPO):
    """GRPO, and after it a step that imitates the group's best responses."""

    imitation_coef: float

    def update(self, learner, groups):
        batch = learner.receive(groups, self.forwards)
        metrics = self.improve(learner, batch)

        def imitation(tokens):
            return -self.imitation_coef * tokens.logprobs * tokens.columns["best"], {"actor/imitation": tokens.logprobs.detach()}

        best = [sample for sample in batch if sample.reward == 1.0]
        for sample in best:
            sample.columns["best"] = 1.0
        step = learner.step("actor", best, imitation, aggregation="seq-mean-token-mean", temperature=1.0)
        return metrics | step.logged | {"actor/imitation_loss": step.loss}


def algorithm(folder: str):
    (Path(folder) / "algorithm").mkdir(exist_ok=True)
    (Path(folder) / "algorithm" / "cloned.yaml").write_text(YAML)
    return build(resolved(compose(["algorithm=cloned"], own_conf=folder))).algorithm


def updated(model: str, chosen: GRPO) -> dict[str, float]:
    learner = make_learner(model, 64)
    metrics = chosen.update(learner, share(credited(make_groups(), chosen)))
    return metrics | {"updates": learner.updates["actor"]}


def test_an_auxiliary_loss_needs_its_own_file_and_a_yaml(random_model, tmp_path):
    chosen = algorithm(str(tmp_path))
    assert (type(chosen).__name__, chosen.name, chosen.imitation_coef) == ("Cloned", "cloned", 0.5)
    first, second = run_ranks(updated, 2, random_model, chosen)
    assert first["actor/imitation_loss"] == second["actor/imitation_loss"] > 0
    assert first["updates"] == 3
