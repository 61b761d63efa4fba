"""One self-contained HTML page of tables and figures, written to a file and to MLflow."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import mlflow

EXPERIMENT = "reports"
COLOURS = (
    "tab:blue",
    "tab:orange",
    "tab:green",
    "tab:red",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:olive",
    "tab:cyan",
    "tab:gray",
)
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}
img{max-width:100%}p{max-width:60em}"""


class Page:
    """Parts in their order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []
        self.figures: dict[str, bytes] = {}
        self.tables: dict[str, str] = {}
        self._notes: list[str] = []

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def note(self, text: str) -> None:
        """A paragraph that is shown on the screen too: what the reader would otherwise miss."""
        self.text(text)
        self._notes.append(text)

    def table(self, name: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table; `name` is its file's name in MLflow."""
        cells = [[_cell(value) for value in row] for row in rows]
        self.parts.append(
            "<table><tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in header) + "</tr>"
            + "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in cells) + "</table>"
        )  # fmt: skip
        widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
        lines = [list(header), *cells]
        self.tables[name] = "\n".join(
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        )

    @staticmethod
    def file_of(out: Path, name: str) -> Path:
        """Where a figure is written, beside the page."""
        return out.parent / f"{out.stem}-{name}.png"

    def figure(self, name: str, figure: Any) -> None:
        """A figure; `name` is its file's name in MLflow."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        plt.close(figure)
        self.figures[name] = buffer.getvalue()
        encoded = base64.b64encode(buffer.getvalue()).decode()
        self.parts.append(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{encoded}">')

    def write(self, out: Path, uri: str) -> None:
        """The page to `out`; page, figures and tables to a run in the experiment `reports`; tables to the screen."""
        out.parent.mkdir(parents=True, exist_ok=True)
        body = f"<!doctype html><meta charset=utf-8><title>{html.escape(self.title)}</title><style>{STYLE}</style>"
        out.write_text(f"{body}<h1>{html.escape(self.title)}</h1>{''.join(self.parts)}\n")
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(EXPERIMENT)
        with mlflow.start_run(run_name=self.title) as run:
            mlflow.log_artifact(str(out))
            for name, image in self.figures.items():
                file = self.file_of(out, name)
                file.write_bytes(image)
                mlflow.log_artifact(str(file), "figures")
            for name, text in self.tables.items():
                mlflow.log_text(text, f"tables/{name}.txt")
        for text in self.tables.values():
            print(f"\n{text}")
        for text in self._notes:
            print(f"\nnote: {text}")
        print(f"\n  page    {out}\n  MLflow  run {run.info.run_id} in {uri}")


def axes_grid(columns: int, width: float = 4.2, height: float = 3.4, rows: int = 1) -> tuple[Any, Any]:
    """Axes in the house's look: a row of them, or [rows, columns] if there are more rows."""
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False)
    for one in axes.flat:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes[0] if rows == 1 else axes


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
