"""What a device's process agrees on with who starts it: a variables, exit codes, and their errors.

It stands apart from the supervised way to train, which a bundle of `split --lean` leaves out.
"""

from __future__ import annotations

import os

from .agreed import CopiesError
from .coded import CodedError
from .held_weights import WeightsError
from .limits import CompilerError, NoGpuError
from .records import CommitError
from .rendezvous import NoAddressError
from .state import StateError
from .stream import BatchError


class MpiError(CodedError, ValueError):
    """Report processes that cannot send over MPI, and what to do; for the user to act on."""


CONTROL = "BIGBRAIN_CONTROL"  # in the environment: the file descriptor of a supervisor's line
BAD_INPUT = 2  # exit code; as argparse's
INPUT_ERRORS = (
    BatchError,
    CommitError,
    CompilerError,
    CopiesError,
    MpiError,
    NoAddressError,
    NoGpuError,
    StateError,
    WeightsError,
)
NOT_SAVED = 73  # exit code where the files of --save cannot be written: EX_CANTCREAT of sysexits.h
TAKEN_OVER = 77  # where another run or a rollback owns its commits: EX_NOPERM of sysexits.h


def log_limit() -> int | None:
    """Return how many bytes of sent messages this process may keep; None: nobody has said."""
    given = os.environ.pop("BIGBRAIN_LOG_BYTES", None)
    return None if given is None else int(given)
