"""Rows mean what they say: messages, tools, templates and ids, or a fault with file and row."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.data.messages import PromptError, as_messages, as_tools
from pipelines.data.problems import DataConfig, DataError, load_problems, reading_notes, short_names
from pipelines.data.prompts import check_template_arguments, load_tokenizer, render_prompt
from pipelines.data.row_formats import RowFormat
from serve import typed_json

# Templates of kinds that models have: one that tests for a key, one that refuses system turns, one with tools and a switch.
NULL_SENSITIVE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ raise_exception('one call only') }}{% endif %}<|user|>{{ m.content }}"
    "{% endfor %}<|assistant|>"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('This template takes no system turn') }}{% endif %}"
    "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|assistant|>"
)
SWITCHED = (
    "{% if tools %}<|user|>{{ tools | tojson }}{% endif %}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": None, "y": 1}}}


@pytest.fixture
def tokenizer(random_model):
    return load_tokenizer(random_model)


def row(**changes):
    return {"data_source": "math", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "extra_info": {"note": "x"}} | changes


def load(folder, rows, tokenizer, name="rows.jsonl", **options):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(one) for one in rows))
    return load_problems(DataConfig(files=[str(file)]), tokenizer, 500, **options)


def text_of(problem, tokenizer):
    return tokenizer.decode(problem.prompt_ids)


def test_nulls_that_parquet_adds_do_not_reach_the_template(tmp_path, tokenizer):
    tokenizer.chat_template = NULL_SENSITIVE
    rows = [row(prompt=[{"role": "user", "content": "1+1=", "tool_calls": None}, {"role": "user", "content": "2"}])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (problem,) = load_problems(DataConfig(files=[str(tmp_path / "rows.parquet")]), tokenizer, 100).problems
    assert text_of(problem, tokenizer) == "<|user|>1+1=<|user|>2<|assistant|>"


MESSAGES = [{"role": "user", "content": "1+1="}]


def test_messages_written_as_json_are_messages(tmp_path, tokenizer):
    one, other = (load(tmp_path, [row(prompt=prompt)], tokenizer).problems for prompt in (MESSAGES, json.dumps(MESSAGES)))
    assert one == other
    assert as_messages("[1, 2] + [3] =") == [{"role": "user", "content": "[1, 2] + [3] ="}]
    assert as_messages('[{"a": 1}]') == [{"role": "user", "content": '[{"a": 1}]'}]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (str(MESSAGES), "looks like messages but is no JSON"),
        ('[{"role": "user", "content": "1+1="', "looks like messages but is no JSON"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}], r"content in parts \(image, text\)"),
        ([{"role": "user", "content": "<image>How many?"}], "message 0 has <image>"),
        ("<video> What happens?", "message 0 has <video>"),
        ("  \n", "it is empty"),
        ([{"role": "user", "content": " "}], "it is empty"),
        ([{"content": "x"}], "message 0 is not an object"),
        ([{"role": "user", "content": None}], "message 0 is not an object"),
    ],
)
def test_a_prompt_that_cannot_be_meant_is_a_fault_with_file_and_row(tmp_path, tokenizer, prompt, reason):
    with pytest.raises(DataError, match=rf"rows.jsonl, row 1, column 'prompt': .*{reason}"):
        load(tmp_path, [row(), row(prompt=prompt)], tokenizer)


@pytest.mark.parametrize("column", ["images", "image", "videos", "audio"])
def test_pictures_are_refused_by_name(tmp_path, tokenizer, column):
    with pytest.raises(DataError, match=f"row 1, column '{column}': pictures, videos and sound are not supported"):
        load(tmp_path, [row(**{column: []}), row(**{column: ["a.png"]})], tokenizer)


def test_tools_reach_the_template(tmp_path, tokenizer):
    tokenizer.chat_template = SWITCHED
    for tools in ([TOOL], json.dumps([TOOL])):
        (problem,) = load(tmp_path, [row(tools=tools)], tokenizer).problems
        assert '"y": 1' in text_of(problem, tokenizer) or '"y":1' in text_of(problem, tokenizer)
        assert '"x"' not in text_of(problem, tokenizer)  # a null that Parquet may have added
    (problem,) = load(tmp_path, [row(tools=None)], tokenizer).problems
    assert text_of(problem, tokenizer) == "<|user|>1+1=<|assistant|>"


@pytest.mark.parametrize(
    ("template", "reason"), [(NO_SYSTEM, "does not show them"), (None, "no chat template that could show them")]
)
def test_tools_that_would_be_lost_are_refused(tmp_path, tokenizer, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=f"row 0, column 'prompt': the row has tools, and .* {reason}"):
        load(tmp_path, [row(tools=[TOOL])], tokenizer)


@pytest.mark.parametrize("tools", ["{", {"a": 1}, ["f"]])
def test_tools_are_a_list_of_objects(tools):
    with pytest.raises(PromptError, match="tools"):
        as_tools(tools)


def test_what_a_template_says_names_file_and_row(tmp_path, tokenizer):
    tokenizer.chat_template = NO_SYSTEM
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    with pytest.raises(
        DataError, match=r"rows\.jsonl, row 1, column 'prompt': the model's chat template said: This template takes no"
    ):
        load(tmp_path, [row(), row(prompt=system)], tokenizer)
    tokenizer.chat_template = "{{ missing.field }}"
    with pytest.raises(DataError, match="row 0, column 'prompt': the model's chat template said: 'missing' is undefined"):
        load(tmp_path, [row()], tokenizer)


def test_bos_is_never_doubled(tokenizer):
    tokenizer.bos_token = "1"
    tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.decode(render_prompt(tokenizer, "2+3")) == "12+3"
    tokenizer.chat_template = None
    assert tokenizer.decode(render_prompt(tokenizer, "112+3")) == "12+3"


def test_template_arguments_reach_training_and_the_critics_questions(tmp_path, tokenizer):
    from pipelines.config.run import ASSETS
    from pipelines.engines.self_critic_prompt import load_self_critic_prompt

    tokenizer.chat_template = SWITCHED
    problems = [
        load(tmp_path, [row()], tokenizer, template_arguments=one).problems[0] for one in (None, {"enable_thinking": False})
    ]
    assert [text_of(problem, tokenizer)[-1] for problem in problems] == [">", "0"]
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    file = str(ASSETS / "self_critic_prompts/compact.yaml")
    asked = [load_self_critic_prompt(file, str(tmp_path / "model"), one) for one in (None, {"enable_thinking": False})]
    assert asked[0].plain != asked[1].plain


def test_an_argument_that_the_template_never_reads_is_refused(tokenizer):
    tokenizer.chat_template = SWITCHED
    check_template_arguments(tokenizer, {"enable_thinking": True})
    with pytest.raises(ValueError, match=r"task\.template_arguments\.enable_thinkng: the model's chat template has no variable"):
        check_template_arguments(tokenizer, {"enable_thinkng": True})


def test_ignored_columns_and_a_missing_template_are_said_once(tmp_path, tokenizer):
    found = load(tmp_path, [row(ability="math", hint="x"), row(ability="math", level=None)], tokenizer)
    assert reading_notes(tokenizer, found, found) == [("ignored", "columns that nothing reads: ability, hint")]
    tokenizer.chat_template = None
    assert reading_notes(tokenizer)[0][0] == "no template"


def test_ids_come_from_path_and_row(tmp_path, tokenizer):
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "train.jsonl"
        file.write_text("\n".join(json.dumps(row(extra_info=extra)) for extra in ({}, {"index": 0})))
        files.append(str(file))
    problems = load_problems(DataConfig(files=files), tokenizer, 100).problems
    assert [problem.problem_id for problem in problems] == ["a/train/0", "math//0", "b/train/0", "b/train/1"]
    assert short_names(["x/a.jsonl", "x/b.jsonl"]) == ["a", "b"]
    assert short_names(["s3://one/train.parquet?v=1", "s3://two/train.parquet"]) == ["one/train", "two/train"]


def test_arrays_gzip_and_marks_are_read(tmp_path, tokenizer):
    rows = [row(), row(prompt="1+2=", problem_id="x")]
    one = load(tmp_path, rows, tokenizer).problems
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("\ufeff".encode() + (tmp_path / "rows.jsonl").read_bytes()))
    for name in ("rows.json", "rows.jsonl.gz"):
        problems = load_problems(DataConfig(files=[str(tmp_path / name)]), tokenizer, 100).problems
        assert [p.prompt_ids for p in problems] == [p.prompt_ids for p in one]


TRUTHS = [42, 0.5, True, ["Paris", "paris"], {"target": ["Paris"]}, "42"]


@pytest.mark.parametrize("form", [RowFormat(), RowFormat("openrlhf", data_source="qa")])
@pytest.mark.parametrize("truth", TRUTHS)
def test_a_truth_keeps_its_type(tmp_path, tokenizer, truth, form):
    rows = [row(reward_model={"ground_truth": truth})] if form.name == "verl" else [{"input": "1+1=", "label": truth}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        (problem,) = load_problems(DataConfig(files=[str(tmp_path / name)], format=form), tokenizer, 100).problems
        kept = typed_json.loads(problem.ground_truth)
        assert (type(kept), kept) == (type(truth), truth)


def test_arrays_are_lists_and_what_cannot_be_kept_is_a_fault(tmp_path, tokenizer):
    pq.write_table(pa.Table.from_pylist([row(extra_info={"grid": np.arange(3)})]), tmp_path / "rows.parquet")
    (problem,) = load_problems(DataConfig(files=[str(tmp_path / "rows.parquet")]), tokenizer, 100).problems
    assert typed_json.loads(problem.extra_info) == {"grid": [0, 1, 2]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 5}, "is id [0-9]+, but the model has 5 embeddings: it is another model's tokenizer"),
        ({"vocab_size": 500, "eos_token_id": 500}, r"its stop tokens are \[.*500\], and the model has ids 0 to 499"),
    ],
)
def test_ids_that_the_model_never_had_are_refused_at_the_start(tmp_path, tokenizer, config, message):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 500, "eos_token_id": 1}))
    load_tokenizer(str(tmp_path))
