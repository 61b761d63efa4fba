"""A real engine asks the critic: values are the model's own greedy answers, beside generation, for the right endpoints."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from algorithms.self_critic import MAX_ANSWER_TOKENS, parse_value
from pipelines.config.run import self_critic_of
from pipelines.data.prompts import load_tokenizer, render_prompt
from pipelines.engines.config import Sampling
from tests.conftest import TINY, configure

pytestmark = pytest.mark.engine

PROBLEM, PREFIX, SOLUTION = "37>82/07", "37+9=46;46+9=55;", "37+9=46;46+9=55;55+9=64;64+9=73;73+9=82;#"


@pytest.fixture(scope="module")
def critic():
    return self_critic_of(configure("algorithm=ac2", "task=number_walk"))


@pytest.fixture(scope="module")
def pool(tiny_pool):
    return tiny_pool[0]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def greedy(tokenizer):
    """The critic's answer by plain forwards."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()

    def value(context):
        ids = list(context)
        for _ in range(MAX_ANSWER_TOKENS):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 1:
                break
        return parse_value(tokenizer.decode(ids[len(context) :], skip_special_tokens=True))

    return value


def request(tokenizer, row_id, prefix, **fields):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    reference = ids(SOLUTION) if fields.pop("informed", False) else None
    row = {"row_id": row_id, "prompt_ids": render_prompt(tokenizer, PROBLEM), "prefix_ids": ids(prefix), "n": 4, "seed": row_id}
    row |= {"max_new_tokens": 16, "policy_version": 3, "chunk": True, "ask_value": True, "reference_ids": reference}
    return row | fields


def test_states_and_chunk_ends_are_scored_by_the_models_own_greedy_answer(pool, critic, tokenizer, greedy):
    requests = [
        request(tokenizer, 0, ""),
        request(tokenizer, 1, PREFIX, informed=True),
        request(tokenizer, 2, PREFIX, chunk=False, max_new_tokens=80),
        request(tokenizer, 3, PREFIX, ask_value=False, chunk=False),
    ]
    completions = pool.generate(requests, Sampling(1.0), critic)
    asked = 0
    for row, completion in zip(requests, completions, strict=True):
        ends = zip(completion["response_ids"], completion["self_scored"], completion["endpoint_value"], strict=True)
        for (ids, owned, value), reason in zip(ends, completion["finish_reason"], strict=True):
            assert owned == (row["chunk"] and reason == "length")
            expected = greedy(critic.context(row, ids.tolist())[0]) if owned else None
            assert value == expected
            asked += owned
        expected = greedy(critic.context(row, [])[0]) if row["ask_value"] else None
        assert completion["prefix_value"] == expected
        assert completion["reference_left_out"] is False
        assert all(text.startswith(tokenizer.decode(row["prefix_ids"])) for text in completion["response_text"])
    assert asked >= 6
    assert {completion["prefix_value"] is None for completion in completions[:3]} == {
        False
    }  # the shipped model answers with values
    assert pool.self_critic_seconds() > 0


def test_values_alone_and_references_that_do_not_fit(pool, critic, tokenizer, greedy):
    state = request(tokenizer, 0, PREFIX)
    long = state | {"reference_ids": state["prompt_ids"] * 40}
    (plain, fallen_back) = pool.values([state, long], critic)
    assert plain == fallen_back == greedy(critic.context(state, [])[0])
    (completion,) = pool.generate([long], Sampling(1.0), critic)
    assert completion["reference_left_out"] is True
    beyond = state | {"prefix_ids": state["prefix_ids"] * 20}
    assert pool.values([beyond], critic) == [None]
