"""Optional parts of a run: each has methods of the names that a supervisor calls.

    watch       Watch and LogLoss, and CatchUp: `split --with watch`
    suspicion   Suspicion: `--suspect`
    peering     Peering, and in losing Losing: replicas
    feeding     Feeding: sessions

A bundle has the files of the parts that its plan or its flags need. A part may have any of these
methods:

    acts()                    methods that follow from messages of processes, by message
    look(now), require_end(now)     what it does from time to time; FailedError ends the run
    is_locked(now)            all devices wait for each other
    limits(host), left_bytes(), mind(snapshots, left)     of memory
    greet(member), ignores(member)     a process begins to speak; what it says does not count
    hears(member, now), beats(member, n, waiting, now)     it has said something; how far it is
    connected(member, now), has_finished(member)     it runs steps from now on, or no more
    falls_back(device, done, start, now), all_begin(now), has_done(member, step, now)
    hear_end(member), meant(code, now)     a process has ended; that was for want of memory
    take_over(device), orders(), meet(members)     what a dead one's replacement, and all, are told
    has_states(), starts_over(), lacks_snapshot()     the state of a dead device is with others
    begins(member, step), hear_loss(step, loss, step_s), end_step(step), step_took(step_s, now)
    snapshot(step), take_back(step), begin_anew(why)     messages that were dropped
    move(now)                 the end of a run is nearer
    when_clean(step, act)     what is kept of the steps before `step` has to wait for it
    can_leave_out(device), leave_out(death, reason), why_not(stop), is_of_before(member)
    forget_devices(lost)      devices that the run goes on without
    report_end(), close()
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

IS_WATCHED = Path(__file__).with_name("watch.py").is_file()  # the bundle has it
HAS_MORE = Path(__file__).with_name("more.py").is_file()  # and one of the parts above
END = 1 << 62  # a step after all others

Act = Callable[[], None]
Acts = dict[str, Callable[..., object]]


class Policies:
    """The parts that a run has, in the order in which they were added."""

    def __init__(self) -> None:
        self.parts: list[object] = []

    def ask(self, what: str, *facts: object) -> list[Any]:
        """Call the methods of a name; return what they answer."""
        return [getattr(part, what)(*facts) for part in self.parts if hasattr(part, what)]

    def any(self, what: str, *facts: object) -> bool:
        """Return whether one of them says so; all are asked."""
        return any(self.ask(what, *facts))

    def joined(self, what: str, *facts: object) -> dict[str, Any]:
        """Return all that they say."""
        return {name: value for said in self.ask(what, *facts) for name, value in said.items()}

    def when_clean(self, step: int, act: Act) -> None:
        """Do something that keeps what came of the steps before `step`, once nobody doubts them."""
        if not self.ask("when_clean", step, act):
            act()
