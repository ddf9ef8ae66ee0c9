"""Keep a processor from falling asleep while emulated devices wait for their quota.

    python awake.py CPU      (a program of its own: it imports nothing of ours; a line: it is at it)

A virtual processor that has nothing to do is put to sleep, and its core serves other guests; what
computes next finds cold caches. A device that may run a quarter of the time would sleep three
quarters of it and pay for that each period: its instructions took 20 to 30 % longer than those of
one that runs all the time, on a machine that was otherwise idle. So something runs, that everything
else on the processor comes before.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
LOWEST = 19  # what is nice is counted apart: see `tools.studies.fidelity.reference`


def main() -> None:
    """Turn round and round, at the lowest priority, until whoever started this is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.nice(LOWEST)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    print(flush=True)
    while True:
        pass


if __name__ == "__main__":
    main()
