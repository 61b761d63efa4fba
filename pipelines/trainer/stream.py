"""Reading the rollouts as they arrive, in a thread of its own."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any


def in_background(items: Iterable[Any], timeout_s: float) -> Iterator[Any]:
    """Read an iterable in a thread of its own; TimeoutError if nothing comes for `timeout_s`.

    Its reads wait for other ranks (a dataset pass begins when all have asked for it), and so do forwards: in one thread the two
    waits could each hold the other up.
    """
    buffer: queue.Queue[tuple[str, Any]] = queue.Queue()

    def read() -> None:
        try:
            for item in items:
                buffer.put(("item", item))
            buffer.put(("end", None))
        except BaseException as error:  # handed to the consumer
            buffer.put(("error", error))

    threading.Thread(target=read, daemon=True, name="rollout-stream").start()
    while True:
        try:
            kind, value = buffer.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no rollout group arrived within cluster.learner.stream_timeout_s={timeout_s:g} s.") from None
        if kind == "item":
            yield value
        elif kind == "error":
            raise value
        else:
            return
