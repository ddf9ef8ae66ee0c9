"""The fault matrix of the design: its rows, and what runs each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.conformance.faults import (
    rows_calls,
    rows_disks,
    rows_ends,
    rows_gpus,
    rows_hosts,
    rows_processes,
    rows_replicas,
    rows_runs,
    rows_wrong,
)
from tools.conformance.faults.verdicts import BROKEN, SKIPPED, DoesNotGoError, Ground, Verdict


@dataclass(frozen=True)
class Row:
    """A row of the matrix: `bound` as the design gives it."""

    number: int
    fault: str
    phase: str
    bound: str
    run: Callable[[Ground], Verdict]


@dataclass(frozen=True)
class Result:
    """A row and what came out of it; `took_s` is the time of all its runs."""

    row: Row
    verdict: Verdict
    took_s: float

    def facts(self) -> dict[str, Any]:
        """Return it for JSON."""
        row = self.row
        named = {"row": row.number, "fault": row.fault, "phase": row.phase, "bound": row.bound}
        return {**named, **self.verdict.facts(), "took_s": round(self.took_s, 1)}


ROWS = (
    Row(1, "SIGKILL: first, middle, last", "forward", "1 s", rows_processes.forward),
    Row(2, "SIGKILL", "backward", "1 s", rows_processes.backward),
    Row(3, "SIGKILL", "around and inside the update", "1 s", rows_processes.update),
    Row(4, "SIGKILL", "before step 0", "1 s", rows_processes.before_training),
    Row(5, "SIGKILL", "snapshot, commit, before its record", "1 s", rows_processes.in_snapshot),
    Row(6, "two neighbours; all", "forward", "2 s", rows_processes.together_killed),
    Row(7, "replacement killed, 3 times", "replay", "1 s", rows_processes.while_replaying),
    Row(8, "deaths 50 ms apart; in the join", "join", "2 s; 20 s", rows_processes.in_join),
    Row(9, "SIGKILL, no spare left", "forward", "15 s", rows_processes.no_spare),
    Row(10, "budget spent; same error twice", "forward", "5 s", rows_processes.hopeless),
    Row(11, "SIGSTOP for ever", "compute, recv", "T_hang + 1 s", rows_processes.hang),
    Row(12, "SIGSTOP, then SIGCONT", "forward; whole run", "-", rows_runs.zombie),
    Row(13, "slow, below T_hang", "forward", "-", rows_processes.slow),
    Row(14, "packets dropped; link flap", "send", "T_op + 2 s", rows_disks.packets_dropped),
    Row(15, "supervisor killed", "forward", "T_hang", rows_runs.supervisor_killed),
    Row(16, "host lost", "forward", "T_hang + cold", rows_runs.host_lost),
    Row(17, "disk full", "commit", "0 steps lost", rows_disks.disk_full),
    Row(18, "bit flip, zeros, truncated, missing", "load", "5 s", rows_disks.broken_files),
    Row(19, "corrupt message", "send", "1 s", rows_processes.corrupt_message),
    Row(20, "NaN", "forward", "same step", rows_processes.not_a_number),
    Row(21, "SIGTERM", "forward", "30 s", rows_runs.asked_to_stop),
    Row(22, "Ctrl-C", "forward", "5 s", rows_runs.interrupted),
    Row(23, "MPI rank death", "forward", "-", rows_runs.mpi_rank),
    Row(24, "SIGKILL on a GPU that two share", "whole step", "1 s", rows_gpus.on_gpus),
    Row(25, "SIGKILL and SIGTERM", "forward", "30 s", rows_ends.asked_with_a_death),
    Row(26, "silence between hosts", "forward", "T_hang + 5 s", rows_ends.silent_host),
    Row(27, "nobody reads; events' disk full", "whole run", "-", rows_ends.nobody_reads),
    Row(28, "SIGKILL, with a child of its own", "forward", "-", rows_ends.own_children),
    Row(29, "logs removed, then SIGKILL", "forward", "-", rows_ends.logs_removed),
    Row(
        30, "supervisor stopped, then SIGCONT", "start; forward", "-", rows_ends.supervisor_stopped
    ),
    Row(31, "each call of a device fails", "start; whole run", "-", rows_calls.every_call),
    Row(32, "SIGKILL, in any replica", "whole step", "1 s", rows_replicas.of_any_replica),
    Row(33, "SIGKILL, and its only peer", "as it gives its state", "-", rows_replicas.while_giving),
    Row(34, "wrong, finite: once", "forward; backward", "-", rows_wrong.once),
    Row(35, "wrong, finite: again and again", "forward", "30 s", rows_wrong.for_ever),
    Row(36, "SIGKILL in a replica, no restart", "forward", "1 s", rows_replicas.lost_for_good),
    Row(37, "listening host killed, stopped", "forward", "T_hang + 5 s", rows_hosts.head_lost),
    Row(38, "a replica's host is cut off", "forward", "T_hang + 5 s", rows_hosts.cut_off),
)


def results(ground: Ground, numbers: Sequence[int] = ()) -> Iterator[Result]:
    """Run the rows of these numbers, or all; a row that fails in any way is broken."""
    for row in ROWS:
        if numbers and row.number not in numbers:
            continue
        start = time.monotonic()
        try:
            verdict = row.run(ground)
        except DoesNotGoError as error:
            verdict = Verdict(SKIPPED, str(error))
        except Exception as error:  # whatever it is: the other rows are still worth a run
            text = f"{type(error).__name__}: {error}"
            verdict = Verdict(BROKEN, text.splitlines()[0][:160], problems=(text,))
        yield Result(row, verdict, time.monotonic() - start)
