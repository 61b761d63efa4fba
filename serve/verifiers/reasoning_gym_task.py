"""Any reasoning-gym dataset, scored by the dataset itself."""

import json
from functools import cache
from typing import Any

import reasoning_gym

from serve.verifiers.answer_form import BY_CONVENTION, AnswerConfig, Wanted, extract
from serve.verifiers.answer_guard import refused

OTHERS = ("whole",)


@cache
def _dataset(name: str, options: str) -> Any:
    return reasoning_gym.create_dataset(name, size=1, **json.loads(options))


def score(
    response: str, ground_truth: Any, extra_info: dict[str, Any], answer: AnswerConfig = BY_CONVENTION, convention: str = "tag"
) -> float:
    """The dataset's own score of the text in `<answer>` tags, or of the whole response where there are none.

    Some datasets evaluate answers as code; what `answer_guard` refuses is scored as no answer, and so is unfinished thinking.
    """
    entry = extra_info["entry"]
    found = extract(response, answer.order(convention, OTHERS), Wanted(words=True))
    dataset = _dataset(entry["metadata"]["source_dataset"], json.dumps(extra_info.get("options") or {}, sort_keys=True))
    guarded = None if found is None or refused(entry["metadata"]["source_dataset"], found) else found
    return float(dataset.score_answer(answer=guarded, entry=entry))
