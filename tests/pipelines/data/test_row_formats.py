"""Rows as TRL, OpenRLHF, slime and SkyRL have them, from every kind of file, become the same problems."""

import csv
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.data import problems as data
from pipelines.data.problems import DataConfig, DataError, load_problems
from pipelines.data.prompts import load_tokenizer
from pipelines.data.row_formats import RowFormat

ROWS = {
    "trl": ({"prompt": "1+1=", "solution": "2", "level": 3}, RowFormat("trl", data_source="math")),
    "trl messages": (
        {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"},
        RowFormat("trl", label_key="answer", data_source="math"),
    ),
    "openrlhf": ({"question": "1+1=", "final": "2"}, RowFormat("openrlhf", "question", "final", "math")),
    "slime": ({"prompt": "1+1=", "label": "2", "metadata": {"a": 1}}, RowFormat("openrlhf", "prompt", "label", "math")),
    "skyrl": (
        {
            "prompt": [{"role": "user", "content": "1+1="}],
            "env_class": "math",
            "reward_spec": {"method": "rule", "ground_truth": "2"},
        },
        RowFormat("skyrl"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(random_model):
    return load_tokenizer(random_model)


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_the_same_problem(name, tmp_path, tokenizer):
    row, form = ROWS[name]
    (problem,) = load_problems(DataConfig(files=[write(tmp_path / "rows.jsonl", [row])], format=form), tokenizer, 50).problems
    assert (problem.data_source, problem.ground_truth, problem.problem_id) == ("math", '"2"', "rows/0")
    assert tokenizer.decode(problem.prompt_ids) == "<|user|>1+1=<|assistant|>"


def test_other_columns_go_on_to_the_reward_function(tmp_path, tokenizer):
    row, form = ROWS["trl"]
    config = DataConfig(files=[write(tmp_path / "rows.jsonl", [row | {"privileged_context": "2 because"}])], format=form)
    (problem,) = load_problems(config, tokenizer, 50, keep_prompts=True).problems
    assert json.loads(problem.extra_info) == {"solution": "2", "level": 3, "privileged_context": "2 because", "prompt": "1+1="}
    assert tokenizer.decode(problem.solution_ids) == "2 because"


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        ({"prompt": "x"}, RowFormat("trl"), "no column 'data_source'"),
        ({"prompt": "x"}, RowFormat("trl", label_key="answer", data_source="math"), "no column 'answer'"),
        ({"text": "x", "label": "2"}, RowFormat("openrlhf", data_source="math"), "no column 'input'"),
        ({"prompt": "x", "env_class": "math", "reward_spec": {}}, RowFormat("skyrl"), "'reward_spec' has no 'ground_truth'"),
        ({"prompt": "x", "reward_spec": {"ground_truth": "2"}}, RowFormat("skyrl"), "no column 'env_class'"),
    ],
)
def test_a_fault_names_file_row_and_column(row, form, message, tmp_path, tokenizer):
    with pytest.raises(DataError) as error:
        load_problems(DataConfig(files=[write(tmp_path / "rows.jsonl", [row])], format=form), tokenizer, 50)
    assert "rows.jsonl, row 0" in str(error.value)
    assert message in str(error.value)


def test_csv_and_urls(tmp_path, tokenizer):
    form = RowFormat("openrlhf", "question", "answer", "math")
    with open(tmp_path / "rows.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, ["question", "answer"])
        writer.writeheader()
        writer.writerow({"question": "1+1=", "answer": "2"})
    with fsspec.open("memory://bucket/rows.parquet", "wb") as stream:
        pq.write_table(pa.Table.from_pylist([{"question": "1+1=", "answer": "2"}]), stream)
    files = [str(tmp_path / "rows.csv"), "memory://bucket/rows.parquet"]
    one, other = (load_problems(DataConfig(files=[file], format=form), tokenizer, 50) for file in files)
    assert one.problems == other.problems
    with pytest.raises(DataError, match=r"memory://bucket/none\.parquet: no such file"):
        load_problems(DataConfig(files=["memory://bucket/none.parquet"], format=form), tokenizer, 50)


def test_a_dataset_of_the_hub_is_read_through_its_parquet_conversion(monkeypatch, tmp_path, tokenizer):
    asked = []

    class Hub:
        def glob(self, pattern):
            asked.append(pattern)
            return ["datasets/openai/gsm8k@~parquet/main/train/0000.parquet"] if "gsm8k" in pattern else []

    monkeypatch.setattr("huggingface_hub.HfFileSystem", Hub)
    monkeypatch.setattr(data, "read_rows", lambda file: [{"question": "1+1=", "answer": "2"}] if file.startswith("hf://") else [])
    form = RowFormat("openrlhf", "question", "answer", "gsm8k")
    config = DataConfig(hub="openai/gsm8k", hub_config="main", format=form)
    assert [p.ground_truth for p in load_problems(config, tokenizer, 50).problems] == ['"2"']
    assert asked == ["datasets/openai/gsm8k@~parquet/main/train/*.parquet"]
    with pytest.raises(DataError, match="hub=a/b: no files"):
        load_problems(DataConfig(hub="a/b", format=form), tokenizer, 50)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="use one of verl, trl, openrlhf, skyrl"):
        RowFormat("nemo")
