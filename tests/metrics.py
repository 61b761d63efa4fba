"""What `pipelines/METRICS.md` says, for the tests that hold runs and code against it."""

import json
import re
from pathlib import Path

DOCUMENT = Path("pipelines/METRICS.md")
SYSTEM = "system/"  # MLflow's own


def listed() -> dict[str, list[str]]:
    """The files that log each listed name."""
    found: dict[str, list[str]] = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            assert len(cells) == 4, f"not name, meaning, unit, file: {line}"
            assert all(cells), line
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in found, f"{name} is listed twice"
                found[name] = re.findall(r"`([^`]+)`", cells[3])
    return found


def unlisted(names: set[str]) -> set[str]:
    """Logged names that no line of the document has; MLflow's form of a name (`mean_at_4`) is a name too."""
    patterns = [re.compile(re.sub(r"\\{\w+\\}", "[^/]+(?:/[^/]+)?", re.escape(name.replace("@", "_at_")))) for name in listed()]
    own = {name for name in names if not name.startswith(SYSTEM)}
    return {name for name in own if not any(one.fullmatch(name.replace("@", "_at_")) for one in patterns)}


def logged(output: Path) -> set[str]:
    """Every name that a run wrote for MLflow."""
    lines = [json.loads(line) for line in (output / "mlflow.jsonl").read_text().splitlines()]
    return {name for line in lines if line["kind"] == "metrics" for name in line["values"]}
