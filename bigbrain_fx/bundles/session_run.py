"""A run of a bundle whose batches this process sends: a supervisor in a thread, and its answers.

put(step, batch) ──▶ devices ──▶ loss(step)      state(step) ──▶ files of all devices' states
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from bigbrain_fx.bundles.callers.constants import Constants
from bigbrain_fx.bundles.compile import Split
from bigbrain_fx.bundles.entries import Cutter, RowCounts
from bigbrain_fx.bundles.launch import Run, RunOptions, StepLine, run
from bigbrain_fx.errors import InputError
from bigbrain_fx.supervisor import Event, Feed

LOOK_S = 0.5  # a wait in slices, so that Ctrl-C is heard


Again: TypeAlias = "Callable[[Constants, object, Path, Path, int], Begun]"
"""Constants that have changed, a batch that does not fit, a bundle, a commit of its run, steps ->
another one, to go on.
"""


@dataclass(frozen=True)
class Begun:
    """A bundle whose devices are to be started.

    Attributes:
        made: the plan, the bundle, and notes on them.
        options: of the run.
        constants: of the trace. row_counts, cutter: of its batches.
        again: splits the module anew where it or a batch has changed; None where nothing may.
    """

    made: Split
    options: RunOptions
    constants: Constants
    row_counts: RowCounts | None = None
    cutter: Cutter | None = None
    again: Again | None = None


class SessionRun:
    """Devices of one bundle at work.

    Args:
        bundle: the folder.
        options: of the run.
        events: gets the deaths and replacements of processes.
        losses: gets the losses, by step.

    Attributes:
        has_ended: it takes no batch any more. done: how it ended, if it did well.
    """

    def __init__(
        self, bundle: Path, options: RunOptions, events: list[Event], losses: dict[int, float]
    ) -> None:
        self.bundle, self.events, self.losses = bundle, events, losses
        self.has_ended = False
        self.done: Run | None = None
        self._changed = threading.Condition()
        self._states: list[dict[str, int]] = []  # that were asked for and have come
        self._error: BaseException | None = None
        self._feed = Feed(lambda _step: self._notify(), self._hear_state)
        self._thread = threading.Thread(
            target=self._run, args=(options,), name="bigbrain-fx", daemon=True
        )
        self._thread.start()

    def begin(self) -> int:
        """Wait until the devices have formed; return the step that they begin with."""
        self._wait(lambda: self._feed.first is not None)
        return self._feed.first or 0

    def put(self, step: int, batch: bytes) -> None:
        """Send the batch of a step."""
        self._feed.put(step, [batch])

    def loss(self, step: int) -> float:
        """Wait for the loss of a step."""
        self._wait(lambda: step in self.losses)
        return self.losses[step]

    def state(self, steps: int) -> dict[str, int]:
        """Return open files with the state of each device after so many steps, to be closed."""
        self.require_open()
        self._wait(lambda: steps == self._feed.first or steps - 1 in self.losses)
        self._feed.ask(steps)
        self._wait(lambda: bool(self._states))
        return self._states.pop()

    def end(self) -> None:
        """End the processes."""
        if not self.has_ended:
            self._feed.stop()
        self._thread.join()
        self._feed.close()

    def require_open(self) -> None:
        """Raise what has ended the run, if it has ended.

        Raises:
            BigBrainError: the run's own, or that it is over.
        """
        if self._error is not None:
            raise self._error
        if self.has_ended:
            raise InputError(
                "this session has ended", code="BX3141", help="make another: machine(model, ...)"
            )

    # ------------------------------------------------------------------ the supervisor's thread

    def _run(self, options: RunOptions) -> None:
        try:
            self.done = run(
                self.bundle, options, self._hear_step, on_event=self.events.append, feed=self._feed
            )
        except BaseException as error:  # it is raised again where the caller waits
            self._error = error
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _hear_step(self, line: StepLine) -> None:
        self.losses[line.step] = line.loss
        self._notify()

    def _hear_state(self, _step: int, files: Mapping[str, int]) -> None:
        self._states.append(dict(files))
        self._notify()

    def _wait(self, is_there: Callable[[], object]) -> None:
        with self._changed:
            while not is_there() and not self.has_ended:
                self._changed.wait(LOOK_S)
        if not is_there():
            self.require_open()
