"""Run a bundle on this host, one process per device; or say what to type on every host.

This room knows processes, ports and log files. It knows nothing of graphs, and the processes it
starts know nothing of it: they run the bundle's own train.py, or infer.py. With `spares` given,
`supervisor` starts them and replaces those that die.
"""

from bigbrain_fx.bundles.launch.failures import PEER_LOST, DeviceLostError, RunError
from bigbrain_fx.bundles.launch.gpus import require_gpus
from bigbrain_fx.bundles.launch.hosts import commands, hosts, secret_command
from bigbrain_fx.bundles.launch.options import (
    DEFAULT_STEPS,
    BatchLine,
    Line,
    Run,
    RunOptions,
    StepLine,
)
from bigbrain_fx.bundles.launch.ports import free_port, require_free
from bigbrain_fx.bundles.launch.process import Command, Process, Spawn, popen
from bigbrain_fx.bundles.launch.program import entry
from bigbrain_fx.bundles.launch.running import run
from bigbrain_fx.bundles.launch.scripts import (
    CHECKS,
    NEEDS,
    STARTED_BY,
    SUFFIX,
    Script,
    launch_script,
)
from bigbrain_fx.bundles.launch.status import Status, metrics_at, prometheus, read_status
from bigbrain_fx.bundles.launch.supervised import (
    can_supervise,
    is_lean,
    require_not_lean,
    require_not_nccl,
    start_supervised,
)

__all__ = [
    "CHECKS",
    "DEFAULT_STEPS",
    "NEEDS",
    "PEER_LOST",
    "STARTED_BY",
    "SUFFIX",
    "BatchLine",
    "Command",
    "DeviceLostError",
    "Line",
    "Process",
    "Run",
    "RunError",
    "RunOptions",
    "Script",
    "Spawn",
    "Status",
    "StepLine",
    "can_supervise",
    "commands",
    "entry",
    "free_port",
    "hosts",
    "is_lean",
    "launch_script",
    "metrics_at",
    "popen",
    "prometheus",
    "read_status",
    "require_free",
    "require_gpus",
    "require_not_lean",
    "require_not_nccl",
    "run",
    "secret_command",
    "start_supervised",
]
