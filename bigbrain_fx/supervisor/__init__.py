"""Keep a training run going when its processes die; stdlib only, copied into bundles.

One supervisor per host starts the device processes and warm spares, owns the snapshots in memory,
and replaces what dies. It imports nothing of ours and knows neither torch nor what is computed.
"""

from .command import main, stopped_by_sigterm, tail
from .events import Event, EventLog, status
from .host import Supervisor
from .job import FailedError, Job, OnStep, Outcome, Rescue
from .judging import BAD_INPUT, Death
from .processes import Order, Process, Start, popen

__all__ = [
    "BAD_INPUT",
    "Death",
    "Event",
    "EventLog",
    "FailedError",
    "Job",
    "OnStep",
    "Order",
    "Outcome",
    "Process",
    "Rescue",
    "Start",
    "Supervisor",
    "main",
    "popen",
    "status",
    "stopped_by_sigterm",
    "tail",
]
