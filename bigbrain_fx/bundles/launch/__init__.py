"""Run a bundle on this host, one process per device; or list the commands for every host.

The package knows processes, ports and log files, not graphs. The processes that it starts know
nothing of the package: they run the bundle's own train.py, or infer.py. With `spares` given,
`supervisor` starts them and replaces those that die.
"""

from bigbrain_fx.bundles.launch.crew import GRACE_S as GRACE_S, environment as environment
from bigbrain_fx.bundles.launch.failures import (
    BAD_INPUT as BAD_INPUT,
    PEER_LOST as PEER_LOST,
    DeviceLostError as DeviceLostError,
    RunError as RunError,
    failure as failure,
)
from bigbrain_fx.bundles.launch.gpus import (
    require_compilers as require_compilers,
    require_gpus as require_gpus,
)
from bigbrain_fx.bundles.launch.host_commands import (
    commands as commands,
    hosts as hosts,
    secret_command as secret_command,
)
from bigbrain_fx.bundles.launch.options import (
    DEFAULT_STEPS as DEFAULT_STEPS,
    Backend as Backend,
    BatchLine as BatchLine,
    Line as Line,
    Run as Run,
    RunOptions as RunOptions,
    StepLine as StepLine,
)
from bigbrain_fx.bundles.launch.ports import free_port as free_port, require_free as require_free
from bigbrain_fx.bundles.launch.process import (
    Command as Command,
    Process as Process,
    Spawn as Spawn,
    popen as popen,
)
from bigbrain_fx.bundles.launch.program import entry as entry
from bigbrain_fx.bundles.launch.run_folders import run_folder as run_folder
from bigbrain_fx.bundles.launch.running import run as run
from bigbrain_fx.bundles.launch.scripts import (
    STARTERS as STARTERS,
    Script as Script,
    launch_script as launch_script,
)
from bigbrain_fx.bundles.launch.status import (
    Status as Status,
    metrics_at as metrics_at,
    read_status as read_status,
)
from bigbrain_fx.bundles.launch.supervised import (
    can_supervise as can_supervise,
    is_lean as is_lean,
    require_not_lean as require_not_lean,
    require_not_nccl as require_not_nccl,
    start_supervised as start_supervised,
)
from bigbrain_fx.bundles.launch.warm import started_first as started_first
