"""`python -m pipelines.tracking outputs/RUN`: send to MLflow what a run could not."""

import sys

from pipelines.store.outbox import Outbox


def main(folder: str) -> int:
    """Send; the exit status."""
    outbox = Outbox(folder)
    if not outbox.begun():
        print(f"error: {folder}: no run there (mlflow.jsonl is missing).", file=sys.stderr)
        return 2
    before, sent = outbox.unsent(), outbox.send()
    print(f"{before - outbox.unsent()} of {before} records sent, MLflow run {outbox.run_id()}")
    if not sent:
        print(f"error: MLflow did not take the rest ({outbox.failure}).", file=sys.stderr)
    return 0 if sent else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pipelines.tracking outputs/RUN")
    sys.exit(main(sys.argv[1]))
