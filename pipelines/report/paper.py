"""Every figure and table of a paper: made from runs, groups and checkpoints as far as they allow, and else what it needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.report.critic_gradients import Pulls
from pipelines.report.page import Page
from pipelines.report.probes import GroupFolder
from pipelines.report.runs import Configuration


class NeedsError(Exception):
    """What an exhibit cannot be made without."""


@dataclass(frozen=True)
class Material:
    """What there is to make exhibits of."""

    configurations: Sequence[Configuration]
    continued: Sequence[GroupFolder] = field(default=())  # of `pipelines.replay`, by the step of their checkpoint
    probed: Sequence[GroupFolder] = field(default=())  # of `pipelines.replay mode=probe`, likewise
    pulls: Sequence[Pulls] = field(default=())  # of checkpoints with a value model

    def of(self, *algorithms: str, least: int = 1) -> list[Configuration]:
        """Evaluated configurations of these algorithms, in this order; NeedsError where fewer than `least` algorithms have one."""
        found = [[one for one in self.configurations if one.algorithm == name and len(one.evaluations())] for name in algorithms]
        if sum(map(bool, found)) < least:
            absent = [name for name, some in zip(algorithms, found, strict=True) if not some]
            raise NeedsError(f"runs of {_listed(absent)}" + (f", {least} of these at least" if least < len(absent) else ""))
        return [one for some in found for one in some]

    def absent(self, *algorithms: str) -> str:
        """A remark on algorithms of an exhibit that have no run."""
        there = {one.algorithm for one in self.configurations}
        missing = [name for name in algorithms if name not in there]
        return f"without {_listed(missing)}, of which there is no run" if missing else ""


@dataclass(frozen=True)
class Exhibit:
    """A figure or table of a paper. `draw` adds it to a page under the name given; it returns a remark, or raises NeedsError."""

    name: str
    caption: str
    draw: Callable[[Page, Material, str], str]


def make_paper(page: Page, exhibits: Sequence[Exhibit], material: Material, out: Path) -> None:
    """Fill a page with the exhibits that the material allows, and end it with the list: made and where, or what they need."""
    rows: list[list[str]] = []
    for exhibit in exhibits:
        name, made = exhibit.name.lower().replace(" ", "-"), len(page.parts)
        page.heading(f"{exhibit.name}. {exhibit.caption}")
        try:
            remark = exhibit.draw(page, material, name)
        except NeedsError as needs:
            del page.parts[made:]
            rows.append([exhibit.name, f"needs {needs}", ""])
            continue
        if remark:
            page.text(f"Here {remark}.")
        file = page.file_of(out, name) if name in page.figures else out
        rows.append([exhibit.name, "made" + (f"; {remark}" if remark else ""), str(file)])
    page.heading("All figures and tables")
    page.table("exhibits", ["exhibit", "made, or what it needs", "where"], rows)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def settings_table(page: Page, name: str, settings: Mapping[str, str], columns: Mapping[str, Configuration]) -> None:
    """What runs were set to: a row for each setting (its title and parameter), a column for each configuration."""
    rows = [[title, *(one.runs[0].params.get(key, "-") for one in columns.values())] for title, key in settings.items()]
    page.table(name, ["setting", *columns], rows)
