"""A bundle that runs step by step, so that one step is one round of a benchmark."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bigbrain_fx.bundles.launch import Line, Run, RunOptions, StepLine

DEADLINE_S = 120.0
Step = Callable[[], float]
"""Wait for a bundle's next step; return the seconds that it says it took."""


@contextmanager
def stepping(runner: Callable[..., Run], bundle: Path, logs: Path, steps: int) -> Iterator[Step]:
    """Run a bundle beside this thread; give what waits for its next step.

    A step begins when the one before it ends, so a caller who does nothing else waits as long as a
    step takes. What the run raised is raised here.
    """
    lines: queue.SimpleQueue[Line | BaseException] = queue.SimpleQueue()
    options = RunOptions(steps=steps, logs=logs, deadline_s=DEADLINE_S)

    def go() -> None:
        try:
            runner(bundle, options, lines.put)
        except BaseException as error:  # raised again by who waits
            lines.put(error)

    def following() -> float:
        line = lines.get(timeout=DEADLINE_S)
        if isinstance(line, BaseException):
            raise line
        assert isinstance(line, StepLine)
        return line.step_s

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield following
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
