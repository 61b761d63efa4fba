"""Any reasoning-gym dataset, scored by the dataset itself."""

import json
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from serve.verifiers.answer_guard import refused


@cache
def _dataset(name: str, options: str) -> Any:
    return reasoning_gym.create_dataset(name, size=1, **json.loads(options))


def score(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The dataset's own score of the text in `<answer>` tags, or of the whole response where there are none.

    Some datasets evaluate answers as code; what `answer_guard` refuses is scored as no answer.
    """
    entry = extra_info["entry"]
    answer = extract_answer(response) or response.rpartition("</think>")[2].strip()
    dataset = _dataset(entry["metadata"]["source_dataset"], json.dumps(extra_info.get("options") or {}, sort_keys=True))
    guarded = None if refused(entry["metadata"]["source_dataset"], answer) else answer
    return float(dataset.score_answer(answer=guarded, entry=entry))
