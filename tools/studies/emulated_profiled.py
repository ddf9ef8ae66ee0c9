"""`profile` on an emulated device: within its quota, from the moment when something is timed.

    python -m tools.studies.emulated_profiled GROUP CPUS WANTED     (run by the nursery)

GROUP is where the thread that computes writes itself into, CPUS is JSON, WANTED what
`bigbrain_fx.measure.ops.child` takes. To load and capture a model is not what a device is slow at.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from bigbrain_fx.measure.ops import child


def held(group: str, cpus: list[int]) -> Callable[[], None]:
    """Return what puts the calling thread into a quota's group and on its processors."""

    def hold() -> None:
        thread = threading.get_native_id()
        Path(group).write_text(str(thread))
        os.sched_setaffinity(thread, cpus)

    return hold


if __name__ == "__main__":
    child.main(sys.argv[3], held(sys.argv[1], json.loads(sys.argv[2])))
