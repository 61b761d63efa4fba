import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.data.problems import DataConfig, DataError, load_problems
from pipelines.data.prompts import load_tokenizer, render_prompt, stop_ids


@pytest.fixture(scope="module")
def tokenizer(random_model):
    return load_tokenizer(random_model)


def row(i=0, **changes):
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"1+{i}="}],
        "reward_model": {"style": "rule", "ground_truth": str(1 + i)},
        "extra_info": {"split": "train", "index": i},
    } | changes


def jsonl(path, rows):
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return str(path)


def load(file, tokenizer, limit=100):
    return load_problems(DataConfig(files=[file]), tokenizer, limit)


def test_parquet_and_jsonl_give_the_same(tmp_path, tokenizer):
    rows = [row(i) for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    one, other = load(jsonl(tmp_path / "rows.jsonl", rows), tokenizer), load(str(tmp_path / "rows.parquet"), tokenizer)
    assert one == other
    assert [p.problem_id for p in one.problems] == ["math/train/0", "math/train/1", "math/train/2"]
    assert tokenizer.decode(one.problems[0].prompt_ids) == "<|user|>1+0=<|assistant|>"


def test_overlong_prompts_are_dropped_by_the_rollouts_renderer_and_counted(tmp_path, tokenizer):
    rows = [row(0), row(1, prompt="x" * 50)]
    loaded = load(jsonl(tmp_path / "rows.jsonl", rows), tokenizer, limit=len(render_prompt(tokenizer, rows[0]["prompt"])))
    assert (len(loaded.problems), loaded.dropped_overlong) == (1, 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"data_source": None}, "row 1: no column 'data_source'"),
        ({"prompt": None}, "row 1: no column 'prompt'"),
        ({"prompt": 3}, "row 1, column 'prompt': expected str or list, found int"),
        ({"prompt": []}, "row 1, column 'prompt': it is empty"),
        ({"prompt": [{"role": "user"}]}, "row 1, column 'prompt': message 0"),
        ({"reward_model": {}}, "row 1, column 'reward_model': it has no 'ground_truth'"),
        ({"problem_id": "math/train/0"}, "row 1, column 'problem_id': 'math/train/0' is already"),
    ],
)
def test_every_fault_names_file_row_and_column(tmp_path, tokenizer, bad, message):
    file = jsonl(tmp_path / "rows.jsonl", [row(0), row(1, **bad)])
    with pytest.raises(DataError) as error:
        load(file, tokenizer)
    assert "rows.jsonl" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", "", "no rows"),
        ("broken.jsonl", '{"a": 1}\n{"b": ', "row 1: not valid JSON"),
        ("broken.parquet", "not parquet", "not a readable .parquet file"),
        ("rows.txt", "x", "only .parquet, .jsonl, .json, .csv files are read"),
    ],
)
def test_unreadable_files(tmp_path, tokenizer, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / name), tokenizer)


def test_no_usable_problem(tmp_path, tokenizer):
    with pytest.raises(DataError, match="1 dropped as longer than 2 tokens"):
        load(jsonl(tmp_path / "rows.jsonl", [row()]), tokenizer, limit=2)


def test_reasoning_gym_rows(tokenizer):
    loaded = load_problems(DataConfig(reasoning_gym="chain_sum", count=4, seed=3), tokenizer, 200)
    assert {p.data_source for p in loaded.problems} == {"reasoning_gym/chain_sum"}
    shown = load_problems(DataConfig(reasoning_gym="chain_sum", count=1, seed=3, few_shot=1), tokenizer, 300).problems[0]
    text = tokenizer.decode(shown.prompt_ids)
    assert text.count("<|user|>") == 2
    assert text.endswith(tokenizer.decode(loaded.problems[0].prompt_ids))
    with pytest.raises(DataError, match="chain_summ"):
        load_problems(DataConfig(reasoning_gym="chain_summ"), tokenizer, 200)


def test_exactly_one_source():
    with pytest.raises(DataError, match="exactly one"):
        DataConfig()


def test_fingerprint_follows_the_content(tmp_path, tokenizer):
    a, b = load(jsonl(tmp_path / "a.jsonl", [row(0)]), tokenizer), load(jsonl(tmp_path / "b.jsonl", [row(2)]), tokenizer)
    assert a.fingerprint != b.fingerprint


def test_plain_text_without_a_template(tokenizer):
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        assert tokenizer.decode(render_prompt(tokenizer, "1+1=")) == "1+1="
    finally:
        tokenizer.chat_template = template


def test_stop_ids_are_the_union_of_both_configs(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert stop_ids(str(tmp_path), tokenizer) == [tokenizer.eos_token_id, 7, 9, 11]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 12}}))  # a model that also sees pictures
    assert stop_ids(str(tmp_path), tokenizer) == [tokenizer.eos_token_id, 7, 9, 12]
