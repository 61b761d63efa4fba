"""`python -m pipelines.tracking outputs/RUN [--repair]`: send to MLflow what a run could not.

A run that went back to a checkpoint has logged some steps twice, and MLflow takes no value back: `--repair` makes a run of the same
name with the last values and deletes the old one.
"""

import sys

from pipelines.store.outbox import Outbox


def main(folder: str, repair: bool = False) -> int:
    """Send, or write the run anew; the exit status."""
    outbox = Outbox(folder)
    if not outbox.begun():
        print(f"error: {folder}: no run there (mlflow.jsonl is missing).", file=sys.stderr)
        return 2
    before, sent = outbox.unsent(), outbox.send()
    print(f"{before - outbox.unsent()} of {before} records sent, MLflow run {outbox.run_id()}")
    for note in outbox.torn:
        print(f"warning: {note}", file=sys.stderr)
    if not sent:
        print(f"error: MLflow did not take the rest ({outbox.failure}).", file=sys.stderr)
        return 1
    if steps := outbox.doubled():
        if not repair:
            print(f"steps {steps[0]} to {steps[-1]} were done again and are there twice; --repair writes the run with each once")
        elif outbox.repair() is None:
            print(f"error: the run could not be written anew ({outbox.failure}).", file=sys.stderr)
            return 1
        else:
            print(f"MLflow run {outbox.run_id()} has each step once, and the old one is deleted")
    return 0


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--repair"]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stdout if "--help" in arguments else sys.stderr)
        sys.exit(0 if "--help" in arguments else 2)
    sys.exit(main(arguments[0], "--repair" in sys.argv))
