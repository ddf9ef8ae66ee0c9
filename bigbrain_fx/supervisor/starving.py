"""Time in which processes had no processor: a busy host is no fault of theirs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from .processes import DeviceProcess

NS_PER_S = 1e9


class Starves(Protocol):
    """Tells of one process."""

    def look(self) -> float:
        """Return the seconds in which it could have run and did not, in all."""
        ...

    def is_stopped(self) -> bool:
        """Return whether it is known to be stopped (SIGSTOP): it does not run until SIGCONT."""
        ...


class ToldStarving:
    """Starvation of a process on another host, as that host reports it."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def look(self) -> float:
        """Return what was said last."""
        return self.total_s

    def is_stopped(self) -> bool:
        """Return false: nothing is said of that."""
        return False


class Starving:
    """How long the threads of a process have waited for a processor (Linux; elsewhere: never).

    Args:
        pid: of a process on this host.
        tasks: where the kernel tells of its threads.
    """

    def __init__(self, pid: int, tasks: Path | None = None) -> None:
        self.tasks = Path(f"/proc/{pid}/task") if tasks is None else tasks
        self.waited_ns: dict[str, int] = {}
        self.total_s = 0.0

    def look(self) -> float:
        """Return the seconds in all; of threads that wait at a time only the longest counts."""
        before, self.waited_ns = self.waited_ns, _waited_ns(self.tasks)
        more = (ns - before.get(thread, 0) for thread, ns in self.waited_ns.items())
        self.total_s += max(more, default=0) / NS_PER_S
        return self.total_s

    def is_stopped(self) -> bool:
        """Return whether all of its threads are stopped; a debugger's are not meant."""
        with suppress(OSError, IndexError):
            told = [(thread / "stat").read_text() for thread in self.tasks.iterdir()]
            return {text.rpartition(")")[2].split()[0] for text in told} == {"T"}
        return False


def _waited_ns(tasks: Path) -> dict[str, int]:
    """Return by thread what it has waited, its second field; those that end meanwhile are none."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for thread in list(tasks.iterdir()):
            with suppress(OSError, ValueError, IndexError):
                found[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return found


def starving_of(process: DeviceProcess) -> Starves:
    """Return what tells how long a process had no processor; on another host its agent does."""
    told = getattr(process, "starving", None)
    return Starving(process.pid) if told is None else told
