"""What the documents say is there: files, links, commands and examples."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelines.command.entry import combinations
from pipelines.config.compose import compose, resolved
from pipelines.config.run import build
from pipelines.report.__main__ import KEYS

ROOMS = ("algorithms", "conf", "pipelines", "serve", "tests")
DOCUMENTS = sorted([*Path().glob("*.md"), *(file for room in ROOMS for file in Path(room).rglob("*.md"))])
CONFIGURED = {"pipelines.train": "config", "pipelines.evaluate": "evaluate", "pipelines.replay": "replay", "pipelines.sft": "sft"}


def blocks(document: Path, language: str = "") -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, list[str]]]:
    """Every module that a document runs, with its arguments; `...` stands for the reader's own."""
    found = set()
    for document in DOCUMENTS:
        lines = [line.partition("  #")[0] for block in blocks(document) for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines += re.findall(r"`([^`\n]*python -m [^`\n]+)`", prose)
        for line in lines:
            _, runs, rest = line.partition("python -m ")
            if runs:
                found.add(rest)
    split = [shlex.split(command) for command in sorted(found)]
    return [(module, [one for one in arguments if one != "..."]) for module, *arguments in split]


def test_the_readme_is_short():
    assert len(Path("README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_that_are_named_exist(document):
    """A path stands from the root, from the document's folder, or beside the path before it."""
    named = re.findall(r"`([\w/.{},*-]+\.(?:py|yaml|md|toml))`", document.read_text())
    before = document.parent
    for name in named:
        if "mine" in name or "myconf" in name or "shifted" in name:  # the reader's own
            continue
        options = re.search(r"\{(.*)\}", name)
        for one in [name.replace(options[0], choice) for choice in options[1].split(",")] if options else [name]:
            homes = [home for home in (Path(), document.parent, before) if list(home.glob(one))]
            assert homes, f"{document} names {name}"
            before = (homes[0] / one).parent


@pytest.mark.parametrize(
    ("module", "arguments"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_commands_name_what_is_there(module, arguments):
    if module == "pytest" or module == "pip":
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    if "=" not in "".join(arguments) or arguments[0] == "--config-dir":
        return
    if module in CONFIGURED:
        for choice in combinations([one for one in arguments if not one.startswith("--")]):
            compose(choice, CONFIGURED[module])
    elif module == "pipelines.report":
        report, *options = arguments
        assert {option.partition("=")[0] for option in options} <= set(KEYS[report])
    else:
        source = Path(spec.origin or "").read_text()
        assert all(flag in source for flag in arguments if flag.startswith("--"))
        overrides = [one for one in arguments if re.fullmatch(r"[a-z_.]+=\S+", one)]
        algorithms = [one.split(",") for one in arguments if Path(f"conf/algorithm/{one.partition(',')[0]}.yaml").is_file()]
        for algorithm, *own in algorithms or [["grpo"]]:
            compose([f"algorithm={algorithm}", *own, *overrides])


def test_make_has_the_targets_that_are_named():
    makefile = Path("Makefile").read_text()
    for document in DOCUMENTS:
        for targets in re.findall(r"`make ([a-z -]+)[`A-Z]", document.read_text()):
            for target in targets.split():
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: make {target}"


def test_the_examples_algorithm_runs_from_two_files(tmp_path, monkeypatch):
    (code,), (yaml,) = (blocks(Path("algorithms/README.md"), language) for language in ("python", "yaml"))
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "myconf/algorithm").mkdir(parents=True)
    (tmp_path / "myconf/algorithm/shifted.yaml").write_text(yaml)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)
    monkeypatch.delitem(sys.modules, "mine")
    chosen = build(resolved(compose(["algorithm=shifted"], own_conf=str(tmp_path / "myconf")))).algorithm
    from algorithms.types import Group

    none = np.zeros(3, bool)
    credit = chosen.credit(Group(np.array([1.0, 0.0, np.nan]), none, np.full(3, np.nan), none))
    assert (credit.advantages.tolist(), credit.actor_mask.tolist()) == ([0.5, -0.5, 0.0], [True, True, False])


def test_the_examples_verifier_scores():
    (code,) = blocks(Path("serve/README.md"), "python")
    names: dict = {}
    exec(code, names)
    assert names["score"](" 33\n", "33", {}) == 1.0
