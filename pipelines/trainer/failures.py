"""What an error that travelled through Ray means: its reason in its own words, and whether it is only the echo of another."""

from ray.exceptions import RayActorError


def root_cause(error: BaseException) -> str:
    """The innermost reason of an error that travelled through Ray, in its own words."""
    seen: set[int] = set()
    current: BaseException = error
    while id(current) not in seen:
        seen.add(id(current))
        inner = getattr(current, "cause", None) or current.__cause__ or current.__context__
        failures = getattr(current, "worker_failures", None)
        if isinstance(failures, dict) and failures:
            inner = next(iter(failures.values()))
        if not isinstance(inner, BaseException):
            break
        current = inner
    text = str(current).strip() or type(current).__name__
    return text if len(text) < 4000 else text[:2000] + " ... " + text[-2000:]


def is_collateral(error: Exception) -> bool:
    """Whether an error only says that another process has gone."""
    import torch.distributed as dist  # seconds, which commands that only print an error need not wait

    return isinstance(error, RayActorError | dist.DistError) or "gloo" in str(error).lower()
