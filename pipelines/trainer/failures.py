"""What an error that travelled through Ray means: its reason in its own words, and whether it is only the echo of another."""

import traceback
from itertools import pairwise
from pathlib import Path

from ray.exceptions import RayActorError


def root_cause(error: BaseException) -> str:
    """The innermost reason of an error that travelled through Ray, in its own words."""
    seen: set[int] = set()
    current: BaseException = error
    while id(current) not in seen:
        seen.add(id(current))
        context = None if current.__suppress_context__ else current.__context__
        inner = getattr(current, "cause", None) or current.__cause__ or context
        failures = getattr(current, "worker_failures", None)
        if isinstance(failures, dict) and failures:
            inner = next(iter(failures.values()))
        if not isinstance(inner, BaseException):
            break
        current = inner
    name, text = type(current).__name__, str(current).strip()
    if not text:
        text = name
    elif type(current).__module__ == "builtins" and not isinstance(current, RuntimeError | ValueError | OSError):
        text = f"{name}: {text}"  # a KeyError's text is only the key
    return text if len(text) < 4000 else text[:2000] + " ... " + text[-2000:]


def trace_of(error: BaseException) -> str:
    """Where an error was raised, on the other side of Ray too."""
    cause = getattr(error, "cause", None)
    told = getattr(cause, "trace", None)
    return "".join(traceback.format_exception(error)) if told is None else f"{told}\n{error}"


def is_collateral(error: Exception) -> bool:
    """Whether an error only says that another process has gone.

    gloo has no error type of its own: a collective that loses its peer raises a RuntimeError, which is told by where it was raised.
    """
    import torch.distributed as dist  # seconds, which commands that only print an error need not wait

    if isinstance(error, RayActorError | dist.DistError):
        return True
    raised = [Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)][-1:]
    return type(error) is RuntimeError and any(pair == ("torch", "distributed") for one in raised for pair in pairwise(one))
