"""`pipelines/METRICS.md` lists what the code can log, and nothing else. Real runs are held against it where they are made."""

import ast
import re
from pathlib import Path

from tests.metrics import listed, unlisted

NAME = re.compile(r"[a-z][a-z0-9_-]*(/[a-z0-9_@{}]+)+")


def literals(file: Path) -> set[str]:
    """The strings of a file, f-strings as they are written."""
    source = file.read_text()
    found, tree = set(), ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.add(node.value)
        if isinstance(node, ast.JoinedStr):
            found.add((ast.get_source_segment(source, node) or "")[2:-1])
    return found


def test_every_listed_name_stands_whole_in_its_file():
    for name, files in listed().items():
        assert files, name
        for file in files:
            assert name in literals(Path(file)), f"{name} is not in {file}"


def test_every_name_of_a_known_kind_in_the_code_is_listed():
    kinds = {name.split("/")[0] for name in listed()}
    files = [file for room in ("algorithms", "pipelines", "serve") for file in Path(room).rglob("*.py")]
    written = {one for file in files for one in literals(file) if NAME.fullmatch(one) and one.split("/")[0] in kinds}
    assert len(written) > 100
    assert not written - set(listed())


def test_a_name_that_is_not_listed_is_noticed():
    logged = {"actor/pg_loss", "val-core/reasoning_gym/chain_sum/acc/mean_at_16", "system/cpu", "actor/pg_loss2", "actor"}
    assert unlisted(logged) == {"actor/pg_loss2", "actor"}
