"""Asking the critic: prompts from template files, which endpoints are whose, and what is left out."""

import dataclasses
import json
import pickle
import re
import shutil

import pytest

from algorithms.self_critic import VALUES, SelfCriticPrompt
from pipelines.config.compose import compose, resolved
from pipelines.config.run import ASSETS, self_critic_of
from pipelines.data.prompts import load_tokenizer
from pipelines.engines.self_critic import SelfCritic
from pipelines.engines.self_critic_prompt import load_self_critic_prompt
from tests.conftest import TINY, configure

SHIPPED = ASSETS / "self_critic_prompts"
QWEN = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


def test_the_compact_prompt_token_by_token(tokenizer):
    prompt = load_self_critic_prompt(str(SHIPPED / "compact.yaml"), TINY)
    asked = prompt.query([3, 40], [50], None)
    assert tokenizer.decode(asked[2:]) == tokenizer.decode([50]) + "<|end|><|user|>?<|assistant|>"
    informed = prompt.query([3, 40], [50], [60, 61])
    assert tokenizer.decode(informed[3:]) == f"<|end|><|user|>{tokenizer.decode([60, 61])}?<|assistant|>"
    assert [tokenizer.decode(prompt.answer(value)) for value in VALUES[:2]] == ["0<|end|>", "0.1<|end|>"]
    assert tokenizer.decode(prompt.answer(1.0)) == "1<|end|>"


def test_a_thinking_models_prompt_is_the_papers(tmp_path, tokenizer):
    """In turns like Qwen3-Thinking's, whose template begins the thinking section of every reply itself."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(QWEN)
    prompt = load_self_critic_prompt(str(SHIPPED / "thinking.yaml"), str(folder))
    text = tokenizer.decode(prompt.query([3], [50], None)[1:])
    assert text.startswith(
        tokenizer.decode([50]) + "</think><|im_end|>\n<|im_start|>user\nPause here and estimate how much rubric credit"
    )
    assert text.endswith("must be `Q value:`.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nQ value: ")
    assert text.count("<think>") == 1
    informed = tokenizer.decode(prompt.query([3], [50], [60])[1:])
    assert f"refer to a reference correct proof here: {tokenizer.decode([60])} Don" in informed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain: '?'", "no text 'close_thinking'"),
        ("{close_thinking: '', plain: '?', with_reference: '?', reply: ''}", "must hold {reference} once"),
        ("[]", "no text 'close_thinking'"),
    ],
)
def test_templates_that_cannot_work_are_named(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_self_critic_prompt(str(file), TINY)
    with pytest.raises(ValueError, match="no such file; builtin:thinking"):
        load_self_critic_prompt(str(tmp_path / "none.yaml"), TINY)


PROMPT = SelfCriticPrompt((9,), (2,), (3,), (4, 2), tuple((10 + i, 1) for i in range(11)))
QUERIES = SelfCritic(PROMPT, context_limit=20, complete_answer=r"<proof>.*</proof>")


def request(**fields):
    return {"prompt_ids": [5, 6], "prefix_ids": [7] * 10, "reference_ids": None, "chunk": True} | fields


@pytest.mark.parametrize(
    ("fields", "text", "reason", "owned"),
    [
        ({}, "", "length", True),
        ({"chunk": False}, "", "length", False),  # rolled out to its end: the judge's, even where the budget cut it off
        ({}, "", "stop", False),  # it finished within the chunk
        ({}, "I thought.</think><proof>so</proof>", "length", False),
        ({}, "I thought.</think><proof>so", "length", True),
        ({}, "put it in <proof>...</proof>", "length", True),  # still thinking
        ({}, "<think>put it in <proof>...</proof>", "length", True),
        ({}, "put it in <proof>...</proof></think>So it is", "length", True),
    ],
)
def test_which_endpoints_are_the_self_critics(fields, text, reason, owned):
    assert QUERIES.scores(request(**fields), text, reason) is owned


def test_a_model_that_does_not_think_answers_anywhere():
    queries = SelfCritic(dataclasses.replace(PROMPT, close_thinking=()), context_limit=20, complete_answer=r"<proof>.*</proof>")
    assert queries.scores(request(), "<proof>so</proof>", "length") is False
    assert queries.scores(request(), "<think><proof>so</proof>", "length") is True


def test_a_reference_that_is_too_long_is_left_out_and_a_state_that_is_not_asked_about():
    assert QUERIES.context(request(), []) == ([5, 6, *[7] * 10, 9, 2], False)
    short = request(prefix_ids=[7] * 2, reference_ids=[8] * 3)
    assert QUERIES.context(short, []) == ([5, 6, 7, 7, 9, 3, 8, 8, 8, 4, 2], False)
    long = request(prefix_ids=[7] * 2, reference_ids=[8] * 9)
    assert QUERIES.context(long, []) == ([5, 6, 7, 7, 9, 2], True)
    assert QUERIES.context(request(), [8] * 5) == (None, False)


def test_the_block_of_a_solution_is_what_serves_as_a_reference():
    tokenizer = load_tokenizer(TINY)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt = load_self_critic_prompt(str(SHIPPED / "compact.yaml"), TINY, solution=r"\d\+\d=\d")
    assert prompt.solution(ids("1+2=3;3+4=7;#07")).tolist() == ids("3+4=7")  # the last
    assert prompt.solution(ids("3;#07")).tolist() == ids("3;#07")  # none: all that follows the thinking
    again = pickle.loads(pickle.dumps(prompt))  # it goes to the coordinator and to every engine
    assert again.solution(ids("1+2=3;")).tolist() == ids("1+2=3")
    files = ("model.path=m", "task.train.files=[a]", "task.validation.files=[b]")
    pattern = resolved(compose(["experiment=ac2_paper", *files]))["task"]["solution"]
    (block,) = re.findall(pattern, "I write <proof> as told.\n<proof>so\nit is</proof> Done.")
    assert block == "<proof>so\nit is</proof>"
    with pytest.raises(ValueError, match=r"task\.solution=.*no regular expression"):
        configure("task.solution='('")


def test_the_critics_context_holds_a_reference_and_no_more_than_the_model(tmp_path):
    config = configure("algorithm=ac2")
    found = self_critic_of(config)
    assert found is not None
    assert found.context_limit == 32 + 104 + found.prompt.longest_instruction + 104 + 4
    assert self_critic_of(configure()) is None
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    shape = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 150}
    (folder / "config.json").write_text(json.dumps(shape))
    small = self_critic_of(
        configure("algorithm=ac2", "model=folder", f"model.path={folder}", "model.self_critic_prompt=builtin:compact")
    )
    assert small is not None
    assert small.context_limit == 150
