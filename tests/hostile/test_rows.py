"""Files of rows as people have them: what is read, and what is said of the rest."""

import gzip
import json
import socket

import numpy as np
import pytest

from pipelines.command import cluster
from pipelines.command.place import place
from pipelines.command.scorable import scoring_of
from pipelines.config.compose import compose, resolved
from pipelines.config.make import ConfigError
from pipelines.config.run import build
from pipelines.data.files import DataError, read_rows
from pipelines.data.problems import DataConfig, load_problems
from pipelines.data.prompts import load_tokenizer
from pipelines.data.row_formats import RowFormat
from pipelines.store import checkpoint
from serve.reward_function import RewardConfig, RewardFunction
from tests.conftest import TINY, configure

ROW = {"data_source": "math", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 0}}
TEXT = json.dumps(ROW)
CSV = "problem_id,prompt\na,1+1=\n"

# What is read as one row with this prompt.
READ = {
    "array.json": f"[{TEXT}]".encode(),
    "spaced.json": f" \n [\n{TEXT}\n]\n".encode(),
    "array.jsonl": f"[{TEXT}]".encode(),
    "lines.json": TEXT.encode(),
    "blank_lines.jsonl": f"\n\n{TEXT}\n\n".encode(),
    "windows.jsonl": f"{TEXT}\r\n".encode(),
    "mark.jsonl": b"\xef\xbb\xbf" + TEXT.encode(),
    "rows.jsonl.gz": gzip.compress(TEXT.encode()),
    "zipped.jsonl": gzip.compress(TEXT.encode()),
    "mark.csv": b"\xef\xbb\xbf" + CSV.encode(),
    "windows.csv": CSV.replace("\n", "\r\n").encode(),
    "rows.csv.gz": gzip.compress(CSV.encode()),
    "separator.jsonl": json.dumps(ROW | {"note": "a\u2028b\u0085c"}, ensure_ascii=False).encode(),
}


@pytest.mark.parametrize(("name", "content"), READ.items(), ids=READ.keys())
def test_what_is_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (row,) = read_rows(str(tmp_path / name))
    assert row["prompt"] == "1+1="


REFUSED = {
    "utf16.jsonl": (TEXT.encode("utf-16"), "it is UTF-16 or UTF-32; save it as UTF-8"),
    "utf16le.jsonl": (TEXT.encode("utf-16-le"), "it is UTF-16 or UTF-32; save it as UTF-8"),
    "utf32.csv": (CSV.encode("utf-32"), "it is UTF-16 or UTF-32; save it as UTF-8"),
    "latin.jsonl": (TEXT.encode() + b"\n" + '{"a": "é"}'.encode("latin-1"), "row 1: byte"),
    "latin.csv": (CSV.encode() + "b,é\n".encode("latin-1"), "row 2: byte"),
    "surrogate.jsonl": (b'{"prompt": "a\\ud800b"}', "row 0, column 'prompt': 'a\\ud800b' holds half a character"),
    "deep_surrogate.jsonl": (b'{"extra": {"x": ["a", {"b": "\\udfff"}]}}', "row 0, column 'extra'"),
    "surrogate_key.jsonl": (b'{"extra": {"\\ud800": 1}}', "row 0, column 'extra'"),
    "twice.jsonl": (b'{"a": 1, "b": 2, "a": 3}', "row 0: the key 'a' is there twice"),
    "twice_inside.jsonl": (TEXT.encode() + b'\n{"a": {"b": 2, "b": 3}}', "row 1: the key 'b' is there twice"),
    "nan.jsonl": (b'{"a": NaN}', "row 0: NaN is no JSON number"),
    "infinity.json": (b'[{"a": -Infinity}]', "-Infinity is no JSON number"),
    "number.jsonl": (b"3", "row 0: expected an object, found int"),
    "array_of_text.json": (b'["a"]', "row 0: expected an object, found str"),
    "array_cut_short.json": (b'[{"a": 1},', "not valid JSON"),
    "line_cut_short.jsonl": (TEXT.encode() + b'\n{"a": ', "row 1: not valid JSON"),
    "pretty.jsonl": (b'{\n"a": 1\n}', "row 0: not valid JSON"),
    "deep.jsonl": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "empty.json": (b"", "the file has no rows"),
    "empty_array.json": (b"[]", "the file has no rows"),
    "blank.jsonl": (b"\n \n", "the file has no rows"),
    "broken.jsonl.gz": (gzip.compress(TEXT.encode())[:-12], "not a readable .jsonl file"),
    "short.csv": (CSV.encode() + b"b\n", "row 1: 1 fields, but the header has 2"),
    "long.csv": (CSV.encode() + b"b,2,3\n", "row 1: 3 fields, but the header has 2"),
    "quote.csv": (CSV.encode() + b'"b,2\n', "not a readable .csv file"),
    "twice.csv": (b"a,a\n1,2\n", "the column 'a' is there twice"),
    "header.csv": (b"a,b\n", "the file has no rows"),
    "empty.csv": (b"", "the file has no rows"),
    "empty.parquet": (b"", "not a readable .parquet file"),
    "short.parquet": (b"PAR1", "not a readable .parquet file"),
    "rows.xlsx": (b"x", "only .parquet, .jsonl, .json, .csv files are read"),
    "rows.gz": (b"x", "only .parquet, .jsonl, .json, .csv files are read"),
}


@pytest.mark.parametrize(("name", "content", "message"), [(n, c, m) for n, (c, m) in REFUSED.items()], ids=REFUSED.keys())
def test_what_is_refused_names_file_row_and_key(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(str(tmp_path / name))
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("solution", [3, ["1", "2"], {"text": "2"}, True, 0.5])
def test_a_reference_solution_is_text(tmp_path, solution):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW | {"reference_solution": solution}))
    with pytest.raises(DataError, match="column 'reference_solution': expected text"):
        load_problems(DataConfig(files=[str(tmp_path / "rows.jsonl")]), load_tokenizer(TINY), 100)


def test_rows_without_a_truth_are_for_reward_functions(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "level": 3}))
    form = RowFormat(name="trl", data_source="math")
    found = load_problems(DataConfig(files=[str(tmp_path / "rows.jsonl")], format=form), load_tokenizer(TINY), 100)
    with pytest.raises(
        DataError, match=r"rows\.jsonl, row 0: no ground truth, which the verifier of 'math' needs; name its column"
    ):
        scoring_of(configure(), None, found.problems, [])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nowhere_to_be_found\ndef score(): pass", "No module named 'nowhere_to_be_found'"),
        ("raise RuntimeError('no key')\ndef score(): pass", "RuntimeError: no key"),
        ("import os\nKEY = os.environ['API_KEY']\ndef score(): pass", "'API_KEY' (it runs isolated: see reward.isolated)"),
        ("import os\nos._exit(3)\ndef score(): pass", "its process died"),
    ],
)
def test_a_reward_file_that_cannot_be_imported_is_said_before_anything_starts(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source)
    reward = RewardFunction.read(RewardConfig(str(tmp_path / "mine.py"), "score", "verl"))
    with pytest.raises(ValueError, match=r"reward.path=.*mine.py: cannot be imported") as caught:
        scoring_of(configure(), reward, [], [])
    assert message in str(caught.value)


def test_a_port_that_is_taken_is_said_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(cluster.ClusterError, match=f"cluster.judge.http_port={port}: another program has this port"):
            cluster.connect(configure().ray, port)
    cluster.check_port(port)


@pytest.mark.parametrize("steps", [3, 5])
def test_a_branch_has_something_left_to_do(tmp_path, steps):
    folder = checkpoint.folder(str(tmp_path), 5)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"step": 5}))
    with pytest.raises(ConfigError, match=f"it stands at step 5, and steps={steps}; raise steps"):
        place(build(resolved(compose([f"branch_from={tmp_path}", f"steps={steps}"]))))
    assert place(build(resolved(compose([f"branch_from={tmp_path}", "steps=6"]))))[0] == str(folder)


def test_small_rewards_stay_what_they_are():
    from pipelines.rollout.stages import _floats

    found = _floats([float(np.float32(v)) for v in (0.1, 3e-7, 1e-12, 1 / 3)])
    assert found[:3].tolist() == [0.1, 3e-7, 1e-12]
    assert found[3] == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("truth", "reason"),
    [(" ", "no ground truth"), ([], "no ground truth"), (["2", ""], "is blank"), ("2 if odd, else 3", "is in words")],
)
def test_truths_that_cannot_be_used_name_file_and_row(tmp_path, truth, reason):
    rows = [ROW, ROW | {"problem_id": "x", "reward_model": {"ground_truth": truth}}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(one) for one in rows))
    found = load_problems(DataConfig(files=[str(tmp_path / "rows.jsonl")]), load_tokenizer(TINY), 100)
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 1: .*{reason}"):
        scoring_of(configure(), None, found.problems, [])
