"""`python -m pipelines.report compare experiment=NAME [runs=ID,ID] [baseline=grpo] [out=outputs/report.html] [uri=sqlite:///mlflow.db]`
`python -m pipelines.report diagnostics groups=FOLDER,FOLDER [out=...] [uri=...]`
`python -m pipelines.report critic_gradients checkpoints=A,B [rollouts=FILE,FILE] [like=frontiercs|aime] [floor=] [bins=] [widest=]`
`python -m pipelines.report paper paper=ac2|easyppo experiment=NAME [runs=ID,ID] [groups=...] [checkpoints=...] [rollouts=...]`

compare: runs of an MLflow experiment (or the runs named) side by side, seeds of one configuration as a mean and a band, labelled
by what differs between them. baseline= names the algorithm, or one of the labels, whose peak the others are to pass.
diagnostics: how good a critic is, from folders of `pipelines.replay`, each of one checkpoint. critic_gradients: how much each
response pulls at a critic model against how noisy its prompt's returns are, for checkpoints and the rollouts of their steps (or
those named); like= draws it as one of the paper's figures, floor= and widest= are parts of the range of rewards.
paper: every figure and table of a paper that runs, groups and checkpoints allow, and what the others need; several experiments are
separated by commas. All write one self-contained page; its figures and tables are in MLflow too.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib and MLflow take seconds, which a wrong argument need not wait
    from pipelines.report.critic_gradients import Pulls
    from pipelines.report.runs import Run

KEYS: dict[str, dict[str, str]] = {
    "compare": {"experiment": "", "runs": "", "baseline": "grpo", "out": "outputs/report.html", "uri": "sqlite:///mlflow.db"},
    "critic_gradients": {
        "checkpoints": "",
        "rollouts": "",
        "like": "",
        "floor": "",
        "bins": "",
        "widest": "",
        "out": "outputs/critic_gradients.html",
        "uri": "sqlite:///mlflow.db",
    },
    "diagnostics": {"groups": "", "out": "outputs/diagnostics.html", "uri": "sqlite:///mlflow.db"},
    "paper": {
        "paper": "",
        "experiment": "",
        "runs": "",
        "groups": "",
        "checkpoints": "",
        "rollouts": "",
        "out": "outputs/paper.html",
        "uri": "sqlite:///mlflow.db",
    },
}


def main(arguments: list[str]) -> int:
    """Run one report; the exit status, 2 for what the user can mend."""
    if not arguments or arguments[0] not in KEYS:
        print((__doc__ or "").strip(), file=sys.stderr if arguments and "help" not in arguments[0] else sys.stdout)
        return 0 if not arguments or "help" in arguments[0] else 2
    try:
        options = _options(arguments[0], arguments[1:])
        reports: dict[str, Callable[[dict[str, str]], None]] = {
            "compare": _compare,
            "critic_gradients": _critic_gradients,
            "diagnostics": _diagnostics,
            "paper": _paper,
        }
        reports[arguments[0]](options)
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _options(report: str, arguments: list[str]) -> dict[str, str]:
    options = dict(KEYS[report])
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in options:
            raise ValueError(f"{argument}: {report} takes {', '.join(f'{name}=' for name in options)}.")
        options[key] = value
    return options


def _compare(options: dict[str, str]) -> None:
    from pipelines.report.compare import compare
    from pipelines.report.page import Page
    from pipelines.report.runs import configurations

    runs = _runs(options)
    page = Page(f"Comparison of {options['experiment'] or f'{len(runs)} runs'}")
    compare(page, configurations(runs), options["baseline"])
    page.write(Path(options["out"]), options["uri"])


def _diagnostics(options: dict[str, str]) -> None:
    from pipelines.report.diagnostics import diagnose
    from pipelines.report.page import Page
    from pipelines.report.probes import GroupFolder

    folders = _listed(options, "groups")
    if not folders:
        raise ValueError("give groups=FOLDER of python -m pipelines.replay.")
    page = Page("Critic diagnostics")
    diagnose(page, [GroupFolder.read(folder) for folder in folders])
    page.write(Path(options["out"]), options["uri"])


def _critic_gradients(options: dict[str, str]) -> None:
    from pipelines.report.critic_gradients import SCALES, Scale, diagnose_gradients
    from pipelines.report.page import Page

    if options["like"] not in ("", *SCALES):
        raise ValueError(f"like={options['like']}: use {' or '.join(SCALES)}.")
    scale = SCALES.get(options["like"], Scale())
    given = {name: _number(options, name) for name in ("floor", "bins", "widest") if options[name]}
    pulls = _pulls(options)
    if not pulls:
        raise ValueError("give checkpoints=FOLDER of a run with a critic model.")
    page = Page("Critic gradients")
    diagnose_gradients(page, pulls, replace(scale, **given))
    page.write(Path(options["out"]), options["uri"])


def _paper(options: dict[str, str]) -> None:
    from pipelines.report.page import Page
    from pipelines.report.paper import Material, make_paper
    from pipelines.report.paper_ac2 import EXHIBITS as AC2
    from pipelines.report.paper_easyppo import EXHIBITS as EASYPPO
    from pipelines.report.probes import GroupFolder
    from pipelines.report.runs import configurations_by_task

    papers = {"ac2": AC2, "easyppo": EASYPPO}
    if options["paper"] not in papers:
        raise ValueError(f"paper={options['paper']}: use {' or '.join(papers)}.")
    tasks = configurations_by_task(_runs(options))
    if options["paper"] == "ac2" and len(tasks) > 1:
        raise ValueError(f"runs on {' and '.join(tasks)}: the figures of ac2 compare runs on one task; name those with runs=ID,ID.")
    folders = [GroupFolder.read(folder) for folder in _listed(options, "groups")]
    material = Material(
        [one for members in tasks.values() for one in members],
        [one for one in folders if one.mode == "continue"],
        [one for one in folders if one.mode == "probe"],
        _pulls(options),
    )
    out = Path(options["out"])
    page = Page({"ac2": "AC2: figures and tables", "easyppo": "EasyPPO: figures and tables"}[options["paper"]])
    make_paper(page, papers[options["paper"]], material, out)
    page.write(out, options["uri"])


def _runs(options: dict[str, str]) -> "list[Run]":
    from pipelines.report.runs import ReportError, read_runs

    if not options["experiment"] and not options["runs"]:
        raise ReportError("give experiment=NAME or runs=ID,ID.")
    if options["runs"]:
        return read_runs(options["uri"], None, _listed(options, "runs"))
    return [run for name in _listed(options, "experiment") for run in read_runs(options["uri"], name, [])]


def _pulls(options: dict[str, str]) -> "list[Pulls]":
    """The gradients of every checkpoint named, on its own rollouts or those named."""
    from pipelines.report.critic_gradients import measure, rollouts_of

    checkpoints = [Path(folder) for folder in _listed(options, "checkpoints")]
    files = [Path(file) for file in _listed(options, "rollouts")] or [rollouts_of(folder) for folder in checkpoints]
    if len(files) != len(checkpoints):
        raise ValueError(f"{len(checkpoints)} checkpoints, but {len(files)} files of rollouts: give one for each.")
    return [measure(folder, file) for folder, file in zip(checkpoints, files, strict=True)]


def _listed(options: dict[str, str], name: str) -> list[str]:
    return [part for part in options[name].split(",") if part]


def _number(options: dict[str, str], name: str) -> Any:
    try:
        return int(options[name]) if name == "bins" else float(options[name])
    except ValueError:
        raise ValueError(f"{name}={options[name]}: give a number.") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
