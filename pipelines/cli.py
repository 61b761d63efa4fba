"""`trusted-critic COMMAND [...]`: the commands by name, the same as `python -m pipelines.COMMAND`."""

import runpy
import sys

COMMANDS = {
    "train": "train as configured",
    "evaluate": "mean@n and best@k of a checkpoint or a model",
    "replay": "offline prefix replay of any buffer with any checkpoint",
    "report": "compare runs, or diagnose a critic",
    "sft": "supervised fine-tuning on responses and values",
    "fetch_model": "write a small pretrained model as a folder",
    "tracking": "send to MLflow what a run could not",
}


def main() -> None:
    """Run the command that is named first; `--help` behind it tells of its arguments."""
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        asked = name.lstrip("_") in ("help", "h")
        width = max(map(len, COMMANDS))
        lines = [f"  {command:<{width}}  {what}" for command, what in COMMANDS.items()]
        print((__doc__ or "").strip(), *lines, sep="\n", file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    sys.argv = [f"trusted-critic {name}", *sys.argv[2:]]
    runpy.run_module(f"pipelines.{name}", run_name="__main__", alter_sys=False)
