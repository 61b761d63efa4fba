"""Whether a run's responses can be scored at all, asked before anything starts."""

from collections.abc import Iterable

from algorithms.types import Problem
from pipelines.data.problems import check_verifiable
from serve.judge import JudgeConfig
from serve.reward_function import RewardFunction
from serve.sandbox import Sandbox
from serve.verifiers.answer_form import AnswerConfig


def check_scorable(problems: Iterable[Problem], reward: RewardFunction | None, config: JudgeConfig, answer: AnswerConfig) -> None:
    """ValueError in a sentence if the reward function cannot be imported, or a problem's verifier cannot be found or used."""
    if reward is None:
        check_verifiable(problems, answer)
        return
    with Sandbox(config.verifier_timeout_s, config.verifier_memory_gib, reward.isolated) as sandbox:
        if failure := sandbox.failure_of(reward):
            hint = " (it runs isolated: see reward.isolated)" if reward.isolated else ""
            raise ValueError(f"reward.path={reward.path}: cannot be imported: {failure}{hint}.")
