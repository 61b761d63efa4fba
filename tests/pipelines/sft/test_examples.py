"""Rows of supervised fine-tuning: what is cut, what is left out, and that both are counted."""

import json

import pytest

from pipelines.config.compose import compose, resolved
from pipelines.config.make import ConfigError, make
from pipelines.config.run import ASSETS
from pipelines.data.files import DataError
from pipelines.data.prompts import load_tokenizer
from pipelines.sft.__main__ import run
from pipelines.sft.examples import ExamplesConfig, load_examples
from tests.conftest import TINY

SELF_CRITIC_PROMPT = str(ASSETS / "self_critic_prompts" / "compact.yaml")
DEFAULTS = {"max_prompt_tokens": 12, "max_response_tokens": 6, "overlong": "drop", "score_above": None, "template_arguments": {}}
ROWS = [
    {"prompt": "1+1", "response": "=2", "score": 1.0},
    {"prompt": "1+2", "response": "=1+2=3", "score": 0},  # seven tokens with its end
    {"prompt": "1+2+3+4+5+6+7", "response": "=28", "score": 0.5},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture
def load(tmp_path):
    def loaded(rows, **settings):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_examples(make(ExamplesConfig, DEFAULTS | {"files": [str(file)]} | settings, "data"), TINY, SELF_CRITIC_PROMPT)

    return loaded


def test_overlong_responses_are_left_out_or_cut_off_by_choice_and_both_are_counted(load, tokenizer):
    dropped = load(ROWS)
    assert dropped.summary() == (
        "1 examples, 1 left out with a prompt of more than 12 tokens, 1 left out with a response of more than 6 tokens"
    )
    cut = load(ROWS, overlong="truncate")
    assert cut.summary() == "2 examples, 1 left out with a prompt of more than 12 tokens, 1 truncated to 6 tokens"
    (whole, prompt), (truncated, _) = cut.used
    assert tokenizer.decode(whole) == "<|user|>1+1<|assistant|>=2<|end|>"
    assert tokenizer.decode(truncated) == "<|user|>1+2<|assistant|>=1+2=3"  # no stop token follows what was cut off
    assert tokenizer.decode(whole[prompt:]) == "=2<|end|>"


def test_low_scores_are_left_out_and_a_missing_score_is_an_error(load):
    assert load(ROWS, score_above=0.0, max_prompt_tokens=20).summary() == "2 examples, 1 left out with a score of 0 or less"
    with pytest.raises(DataError, match=r"rows\.jsonl, row 0: data\.score_above reads column 'score', which is missing"):
        load([{"prompt": "1", "response": "2"}], score_above=0.0)
    with pytest.raises(DataError, match=r"no usable example \(0 examples, 3 left out with a score of 2 or less\)"):
        load(ROWS, score_above=2.0)


def test_a_question_of_the_critic_is_never_cut_off(load):
    row = {"prompt": "1+1", "response": "=2", "value": 0.5}
    question = load([row], max_prompt_tokens=200, max_response_tokens=200)
    assert len(question.used) == 1
    long = row | {"response": "=1+2=3"}
    assert "1 left out with a question of more than 18 tokens" in load([long, *ROWS], overlong="truncate").summary()


def test_the_recipe_of_frontiercs_is_the_papers():
    """EasyPPO Appendix 8.1."""
    tree = resolved(compose(["recipe=frontiercs", "data.files=[a.jsonl]", "output_dir=o"], "sft"))
    data = make(ExamplesConfig, tree["data"], "data")
    assert (data.max_response_tokens, data.overlong, data.score_above, tree["epochs"]) == (32768, "truncate", 0.0, 1)
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch=8192 cannot hold one example of 36864 tokens"):
        run(tree)


def test_another_way_with_overlong_responses_is_refused(load):
    with pytest.raises(ValueError, match=r"data\.overlong=split: use drop or truncate"):
        load(ROWS, overlong="split")
