"""After a death: start again, or stop and say why."""

from __future__ import annotations

import re
import signal
from collections import deque
from dataclasses import dataclass, field

BAD_INPUT = 2  # exit code of a process whose data cannot be used
NOT_FINITE = 65  # and of one whose numbers cannot
NOT_SAVED = 73  # and of one that could not write the files of --save
TAKEN_OVER = 77  # and of one that may write no commits any more
# Somebody else sends these; what a process does to itself (SIGSEGV, SIGABRT...) it would do again.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Death:
    """How a process ended.

    Attributes:
        device: whose process it was.
        step: the step that it was in; -1: it had begun none.
        code: its exit code, negative for a signal.
        text: the error that it reported, if it did.
        log: the file that it wrote to.
        finished_one: whether it had finished a step, or taken one over.
        was_hung: it was ended here, for it made no progress.
        was_suspect: it was ended here, for a spare found `text` otherwise.
        for_memory: the kernel ended it, as memory ran out.
        told_memory: it has reported so itself.
        shown: the error that it reported, as a terminal shows it.
    """

    device: str
    step: int
    code: int
    text: str | None
    log: str
    finished_one: bool
    was_hung: bool = False
    was_suspect: bool = False
    for_memory: bool = False
    told_memory: bool = False
    shown: str | None = None

    @property
    def is_from_outside(self) -> bool:
        """Whether it says nothing of what the process did."""
        return -self.code in OUTSIDE and not (self.was_hung or self.for_memory)

    @property
    def how(self) -> str:
        """Say how it ended in a few words."""
        if self.was_suspect:
            return f"computed in step {self.step} what a spare computes otherwise: {self.text}"
        if self.for_memory:
            return "was killed by the kernel, as memory ran out (signal 9)"
        if self.code < 0:
            return f"was killed by signal {-self.code}"
        return f"ended with exit code {self.code}"

    @property
    def what(self) -> str:
        """Say whose process ended, and how."""
        return f"the process of device {self.device} {self.how}"


@dataclass(frozen=True)
class Failure:
    """Why a run ends though no process has ended by itself.

    Attributes:
        device: that it concerns; None: all of them.
        what: failed, as the first half of an error's sentence.
        log: the file to look into, or its folder.
        step, code, text: as a `Death` has them.
    """

    device: str | None
    what: str
    log: str
    step: int = -1
    code: int = 1
    text: str | None = None


@dataclass(frozen=True)
class Stop:
    """Why a run must stop, in half a sentence; `moves`: other devices could go on with it.

    `more`: what to add where it does stop. `is_short`: this host starts no process any more.
    """

    reason: str
    moves: bool = False
    more: str = ""
    is_short: bool = False


LESS_MEMORY = (
    ": `bigbrain-fx estimate` says what each device will take; split for less "
    "(--activation-checkpointing all, "
    "--offload, more micro-batches), or with fewer devices on its host; --memory-checkpoint-dir "
    "FOLDER "
    "keeps in-memory checkpoints on a disk, --no-replay none"
)


_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def _more(death: Death) -> str:
    return LESS_MEMORY if death.for_memory else ""


def _stop_again(death: Death) -> Stop:
    """Return why an end that came again is the last; other devices may have the memory."""
    if death.for_memory or death.told_memory:
        return Stop("memory ran out at the same step again", death.for_memory, LESS_MEMORY)
    return Stop("the same error came again after a restart")


@dataclass
class Judge:
    """Decide over deaths, one after another."""

    restarts: int
    window_s: float
    times: deque[float] = field(default_factory=deque)
    errors: set[tuple[str, int, str]] = field(default_factory=set)
    unborn: set[str] = field(default_factory=set)
    seen_well: set[str] = field(default_factory=set)

    def stop_for(self, death: Death, now: float) -> Stop | None:
        """Return why the run must stop; None: start a process again.

        An error that would come again is not worth a restart. Such errors are wrong data, numbers
        that are not finite, files that cannot be saved, and commits of another run. The same error
        (or memory that ran out) at the same step of the same device would come again, too. Two ends
        of a device that has never finished a step stop the run as well, unless somebody else ended
        it. Such an error would come on other devices, too; a device whose processes only die may be
        left behind.
        """
        if death.code == BAD_INPUT and not self._was_well_before(death):
            return Stop("its input cannot be used")
        if death.code == NOT_FINITE:
            return Stop("the same numbers would come again")
        if death.code == NOT_SAVED:
            return Stop("the files of --save cannot be written")
        if death.code == TAKEN_OVER:
            return Stop("another run or a rollback has taken over its checkpoints")
        if self._repeats(death):
            return _stop_again(death)
        is_early = not death.finished_one and death.device not in self.seen_well
        if is_early and not death.is_from_outside:
            if death.device in self.unborn:
                twice = "it ended twice before it had finished a step"
                return Stop(twice, death.text is None, _more(death))
            self.unborn.add(death.device)
        reason = self.spent(now)
        return None if reason is None else Stop(reason, death.text is None)

    def born(self, device: str) -> None:
        """Note that a device has finished a step."""
        self.unborn.discard(device)
        self.seen_well.add(device)

    def _was_well_before(self, death: Death) -> bool:
        """Whether a replacement could not begin with what the process before it has begun with.

        A disk or a kernel may fail once: what the devices hold in memory is worth another try.
        """
        return death.step < 0 and death.device in self.seen_well

    def _repeats(self, death: Death) -> bool:
        said = death.how if death.for_memory else death.text
        if said is None:
            return False
        key = (death.device, death.step, _NUMBERS.sub("#", said))  # addresses, bytes that are free
        known = key in self.errors
        self.errors.add(key)
        return known

    def spent(self, now: float) -> str | None:
        """Count a restart; return why there are no more, None: there was one left."""
        while self.times and now - self.times[0] > self.window_s:
            self.times.popleft()
        if len(self.times) >= self.restarts:
            return f"{self.restarts} restarts within {self.window_s:g} s are allowed"
        self.times.append(now)
        return None
