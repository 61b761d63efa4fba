"""What a person sees: one live line while it runs, one table at its end, one sentence when it fails."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.5


class ProgressLine:
    """Polls a run's progress and draws it: in place on a terminal, a line per step elsewhere."""

    def __init__(self, poll: Callable[[], dict[str, Any]]) -> None:
        self._poll, self._stop = poll, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._width = 0
        self._shown = (-1, -1)
        self._began = time.monotonic()

    def __enter__(self) -> "ProgressLine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if sys.stdout.isatty():
            print()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._draw()
        self._draw()

    def _draw(self) -> None:
        try:
            progress = self._poll()
        except Exception:
            return  # the run is ending or has failed; its own error is shown
        text, at = describe(progress, time.monotonic() - self._began), (progress["step"], len(progress["evaluations"]))
        if sys.stdout.isatty():
            print("\r" + text.ljust(self._width), end="", flush=True)
            self._width = len(text)
        elif at != self._shown and at != (0, 0):
            print(text, flush=True)
        self._shown = at


def describe(progress: dict[str, Any], elapsed: float) -> str:
    """One line: step, score, validation, speed, decoding FLOPs, time to go (`elapsed` seconds are shown until a step is done)."""
    parts = [f"step {progress['step']}/{progress['steps']}"]
    if progress["score"] is not None:
        parts.append(f"score {progress['score']:.3f}")
    if progress["evaluations"]:
        step, value = max(progress["evaluations"].items())
        parts.append(f"validation {value:.3f} (step {step})")
    if progress["step_s"]:
        left = (progress["steps"] - progress["step"]) * progress["step_s"]
        parts += [f"{progress['tokens_per_s']:,.0f} tok/s", f"{progress['step_s']:.1f} s/step"]
        parts += [f"decode {flops(progress['decode_flops'])}", f"ETA {clock(left)}"]
    else:
        parts.append(f"starting trainer and engines, {clock(elapsed)}")
    if progress["alarm"]:
        parts.append("ALARM: engine and trainer disagree on log-probabilities (training/rollout_logprob_diff_mean)")
    if progress["warnings"]:
        parts.append(f"{len(progress['warnings'])} warnings (shown at the end)")
    if progress["restarts"]:
        parts.append(f"trainer restarted {progress['restarts']} x")
    return "  ".join(parts)


def flops(value: float) -> str:
    """A FLOP count for people."""
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} FLOP"


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
