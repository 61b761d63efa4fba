"""`python -m pipelines.report compare experiment=NAME [runs=ID,ID] [baseline=grpo] [out=outputs/report.html] [uri=sqlite:///mlflow.db]`
`python -m pipelines.report diagnostics groups=FOLDER,FOLDER [out=...] [uri=...]`
`python -m pipelines.report critic_gradients checkpoints=FOLDER,FOLDER [rollouts=FILE,FILE] [floor=0.075] [bins=6] [widest=0.3]`

compare: runs of an MLflow experiment (or the runs named) side by side, seeds of one configuration as a mean and a band, labelled
by what differs between them. baseline= names the algorithm, or one of the labels, whose peak the others are to pass.
diagnostics: how good a critic is, from folders of `pipelines.replay`, each of one checkpoint. critic_gradients: how much each
response pulls at a critic model against how noisy its prompt's returns are, for checkpoints and the rollouts of their steps (or
those named). All write one self-contained page; its figures and tables are in MLflow too.
"""

import sys
from collections.abc import Callable
from pathlib import Path

KEYS: dict[str, dict[str, str]] = {
    "compare": {"experiment": "", "runs": "", "baseline": "grpo", "out": "outputs/report.html", "uri": "sqlite:///mlflow.db"},
    "critic_gradients": {
        "checkpoints": "",
        "rollouts": "",
        "floor": "",
        "bins": "6",
        "widest": "",
        "out": "outputs/critic_gradients.html",
        "uri": "sqlite:///mlflow.db",
    },
    "diagnostics": {"groups": "", "out": "outputs/diagnostics.html", "uri": "sqlite:///mlflow.db"},
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
    from pipelines.report.runs import ReportError, configurations, read_runs

    if not options["experiment"] and not options["runs"]:
        raise ReportError("give experiment=NAME or runs=ID,ID.")
    ids = [run_id for run_id in options["runs"].split(",") if run_id]
    runs = read_runs(options["uri"], options["experiment"], ids)
    page = Page(f"Comparison of {options['experiment'] or f'{len(ids)} runs'}")
    compare(page, configurations(runs), options["baseline"])
    page.write(Path(options["out"]), options["uri"])


def _diagnostics(options: dict[str, str]) -> None:
    from pipelines.report.diagnostics import diagnose, read_groups
    from pipelines.report.page import Page

    folders = [folder for folder in options["groups"].split(",") if folder]
    if not folders:
        raise ValueError("give groups=FOLDER of python -m pipelines.replay.")
    page = Page("Critic diagnostics")
    diagnose(page, {Path(folder).name: read_groups([folder]) for folder in folders})
    page.write(Path(options["out"]), options["uri"])


def _critic_gradients(options: dict[str, str]) -> None:
    from pipelines.report.critic_gradients import diagnose_gradients, measure, rollouts_of
    from pipelines.report.page import Page

    checkpoints = [Path(folder) for folder in options["checkpoints"].split(",") if folder]
    if not checkpoints:
        raise ValueError("give checkpoints=FOLDER of a run with a critic model.")
    files = [Path(file) for file in options["rollouts"].split(",") if file] or [rollouts_of(folder) for folder in checkpoints]
    if len(files) != len(checkpoints):
        raise ValueError(f"{len(checkpoints)} checkpoints, but {len(files)} files of rollouts: give one for each.")
    floor, widest = (float(options[name]) if options[name] else None for name in ("floor", "widest"))
    page = Page("Critic gradients")
    pulls = [measure(folder, file, floor) for folder, file in zip(checkpoints, files, strict=True)]
    diagnose_gradients(page, pulls, int(options["bins"]), widest)
    page.write(Path(options["out"]), options["uri"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
