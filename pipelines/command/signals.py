"""What a command does when it is told to end (SIGTERM) or interrupted (SIGINT): in good order first, at once when told again."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """The command was told to end; no error, and for nobody to catch on the way."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def status(self) -> int:
        """The exit status that shells expect."""
        return 128 + self.signum


class _Handler:
    """The process's one handler: without a graceful way it raises `Stopped` where the command stands."""

    def __init__(self) -> None:
        self.graceful = False
        self.asked: int | None = None
        self.told = threading.Event()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.graceful and self.asked is None:
            self.asked = signum
            self.told.set()
            return
        raise Stopped(signum)


_handler = _Handler()


def _install() -> None:
    """Handle both signals; Ray puts handlers of its own in their place, so this comes after it too."""
    if threading.current_thread() is threading.main_thread():
        for one in SIGNALS:
            signal.signal(one, _handler)


@contextmanager
def handled() -> Iterator[None]:
    """Handle both signals while it lasts."""
    before = {one: signal.getsignal(one) for one in SIGNALS}
    _install()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for one, handler in before.items():
                signal.signal(one, handler)


@contextmanager
def gracefully(stop: Callable[[], None], grace_s: float) -> Iterator[None]:
    """While it lasts, the first signal calls `stop` (in a thread of its own) and raises `Stopped` at the end of the block; a second
    one, or the end of the grace, raises it at once."""
    _handler.graceful, _handler.asked = True, None
    _handler.told.clear()
    ended = threading.Event()

    def watch() -> None:
        _handler.told.wait()
        if not ended.is_set():
            stop()
            if not ended.wait(grace_s):
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="signals").start()
    _install()
    try:
        yield
    finally:
        ended.set()
        _handler.graceful = False
        _handler.told.set()
    if _handler.asked is not None:
        raise Stopped(_handler.asked)
