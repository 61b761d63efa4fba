"""What a run's responses are scored by, and whether they can be scored at all, asked before anything starts."""

from collections.abc import Sequence

from algorithms.types import Problem
from pipelines.config.run import RunConfig
from pipelines.data.files import DataError
from pipelines.data.problems import check_verifiable
from serve import typed_json
from serve.judge import JudgeConfig
from serve.model_judge.judge import PreparedJudge, check_reachable
from serve.reward_function import RewardFunction
from serve.sandbox import Sandbox
from serve.scoring import Scoring
from serve.verifiers import find


def scoring_of(
    config: RunConfig, reward: RewardFunction | None, train: Sequence[Problem], validation: Sequence[Problem]
) -> Scoring:
    """ValueError in a sentence if the reward function cannot be imported, or a verifier cannot be found, used or asked."""
    task = config.task
    if reward is not None:
        _check_importable(reward, config.judge)
        return Scoring(reward, task.reward_range, task.answer)
    check_verifiable([*train, *validation], task.answer)
    return Scoring(None, task.reward_range, task.answer, _model_judges(config, train, validation))


def _check_importable(reward: RewardFunction, config: JudgeConfig) -> None:
    with Sandbox(config.verifier_timeout_s, config.verifier_memory_gib, reward.isolated) as sandbox:
        if failure := sandbox.failure_of(reward):
            hint = " (it runs isolated: see reward.isolated)" if reward.isolated else ""
            raise ValueError(f"reward.path={reward.path}: cannot be imported: {failure}{hint}.")


def _model_judges(config: RunConfig, train: Sequence[Problem], validation: Sequence[Problem]) -> dict[str, PreparedJudge]:
    """The language models that problems need, each asked once whether it answers."""
    judges: dict[str, PreparedJudge] = {}
    for name, problems in (("train", train), ("validation", validation)):
        graded = [problem for problem in problems if find(problem.data_source).asks_model]
        if not graded:
            continue
        if config.task.model_judge is None:
            raise DataError(
                f"{graded[0].place}: {graded[0].data_source!r} is graded by a language model; name one by task.model_judge, as "
                "task=proofs does."
            )
        judges[name] = PreparedJudge.read(getattr(config.task.model_judge, name))
        for problem in graded:
            known = typed_json.loads(problem.ground_truth), typed_json.loads(problem.extra_info)
            if (lacking := judges[name].prompt.lacks(*known)) is not None:
                where = "reward_model.ground_truth" if lacking == "reference" else f"extra_info.{lacking}"
                raise DataError(
                    f"{problem.place}: no {where}, which the prompt of task.model_judge.{name} shows; give it, or another prompt."
                )
    for judge in {one.config.base_url + one.config.model: one for one in judges.values()}.values():
        check_reachable(judge)
    return judges
