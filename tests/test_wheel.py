"""The built wheel holds all that its commands need, apart from this checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDERS = ("algorithms", "conf", "pipelines", "serve")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for folder_name in FOLDERS:  # a copy: building leaves folders in the source
        shutil.copytree(folder_name, source / folder_name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(name, source)
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel's files alone, in front of everything else on the path; dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True, timeout=300)
    return folder


def run(installed: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=installed.parent, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_configuration_assets_and_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = [file for folder in ("conf", "pipelines/assets") for file in Path(folder).rglob("*") if file.is_file()]
    missing = [file for file in needed if "__pycache__" not in file.parts and str(file) not in names]
    assert not missing
    assert {"algorithms/py.typed", "pipelines/py.typed", "serve/py.typed", "pipelines/METRICS.md"} <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_it_composes_from_its_own_files(installed):
    where = run(installed, sys.executable, "-c", "import pipelines.config.compose as c; print(c.CONF)")
    assert where.strip() == str(installed / "conf")
    printed = run(installed, sys.executable, "-m", "pipelines.train", "algorithm=easyppo", "experiment=aime", "--cfg", "job")
    assert "name: easyppo" in printed
    built = "from pipelines.config.compose import compose, resolved\nfrom pipelines.config.run import build\n"
    built += "print(build(resolved(compose([]))).model.path)"
    assert run(installed, sys.executable, "-c", built).strip() == str(installed / "pipelines/assets/tiny")


def test_its_script_names_the_commands(installed):
    assert "train as configured" in run(installed, str(installed / "bin/trusted-critic"), "--help")
