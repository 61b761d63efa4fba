"""What a run's responses are scored by, beside the judge's own size."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve.model_judge.judge import PreparedJudge
from serve.reward_function import RewardFunction
from serve.verifiers.answer_form import AnswerConfig


@dataclass(frozen=True)
class Scoring:
    """A reward function of the user's own, or the verifiers and how they read answers; and the range in which a reward must lie."""

    reward: RewardFunction | None = None
    bounds: tuple[float, float] | None = None
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    model_judges: Mapping[str, PreparedJudge] = field(default_factory=dict)  # by `train` and `validation`
