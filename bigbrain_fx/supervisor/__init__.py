"""Keep a training run going when its processes die; stdlib only, copied into bundles.

One supervisor per host starts the device processes and warm spares, owns the snapshots in memory,
and replaces what dies. It imports nothing of ours and knows neither torch nor what is computed.
"""

from .command import last_lines, main, stopped_by_sigterm, tail
from .console import Aside, hold_streams, warn
from .events import Event, EventLog, status
from .feeding import Feed
from .host import Supervisor
from .job import FailedError, Job, OnStep, Outcome, Rescue
from .judging import BAD_INPUT, Death
from .processes import LAUNCHER, DeviceProcess, Group, Order, Start, popen
from .secured import how_to_make

__all__ = [
    "BAD_INPUT",
    "LAUNCHER",
    "Aside",
    "Death",
    "DeviceProcess",
    "Event",
    "EventLog",
    "FailedError",
    "Feed",
    "Group",
    "Job",
    "OnStep",
    "Order",
    "Outcome",
    "Rescue",
    "Start",
    "Supervisor",
    "hold_streams",
    "how_to_make",
    "last_lines",
    "main",
    "popen",
    "status",
    "stopped_by_sigterm",
    "tail",
    "warn",
]
