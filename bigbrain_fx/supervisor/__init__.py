"""Keep a training run going when its processes die; stdlib only, copied into bundles.

One supervisor per host starts the device processes and warm standby workers, owns the in-memory
checkpoints, and replaces processes that die. The package imports nothing of ours, and it knows
neither torch nor the model.
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036  # whoever takes an old one reads no traceback
    sys.stderr.write(
        f"error[BX6900]: this is Python {sys.version.split()[0]}: take 3.11 or newer\n"
    )
    sys.exit(2)

from .arguments import FLAGS as FLAGS, Flag as Flag
from .aside import Aside as Aside
from .command import (
    last_lines as last_lines,
    main as main,
)
from .console import hold_streams as hold_streams, warn as warn
from .events import Event as Event, EventLog as EventLog, status as status
from .host import Supervisor as Supervisor
from .host_memory import (
    group_folders as group_folders,
    host_bytes as host_bytes,
    left_bytes as left_bytes,
    number_in as number_in,
    text_of as text_of,
)
from .job import (
    FailedError as FailedError,
    Job as Job,
    Outcome as Outcome,
    Rescue as Rescue,
)
from .judging import Death as Death
from .limits import of_abort as of_abort, remedy_of as remedy_of
from .more_arguments import MORE_FLAGS as MORE_FLAGS
from .outliving import OUTLIVING as OUTLIVING
from .processes import (
    LAUNCHER as LAUNCHER,
    DeviceProcess as DeviceProcess,
    Group as Group,
    Order as Order,
    Start as Start,
    log_limit as log_limit,
    opened_log as opened_log,
    popen as popen,
    uncached as uncached,
)
from .stopping import stopped_by_sigterm as stopped_by_sigterm

if TYPE_CHECKING:
    from .feeding import Feed as Feed
    from .secured import how_to_make as how_to_make


def __getattr__(name: str) -> Any:  # noqa: ANN401  # of a module
    """Import late what only some bundles have."""
    if name == "Feed":
        from .feeding import Feed

        return Feed
    if name == "how_to_make":
        from .secured import how_to_make

        return how_to_make
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
