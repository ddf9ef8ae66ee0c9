"""Control flow of torch (torch.cond, while_loop, scan), which runs under its compiler only.

This file knows where torch's code for it lies, and what to write in its place.
"""

from __future__ import annotations

import re
import traceback

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.sources import with_causes

_THERE = re.compile(r"_higher_order_ops.(cond|while_loop|scan|associative_scan|map)\.py$")
CHOICE = (
    "for torch.cond compute both ways and choose with torch.where(flag, one, two); or write if and "
    "while of Python in a module of its own (self.part = Part() in __init__): a module inside the "
    "model is kept whole"
)


def asks_a_compiler(error: BaseException) -> bool:
    """Whether an error passed through control flow of torch."""
    walked = (traceback.extract_tb(cause.__traceback__) for cause in with_causes(error))
    return any(_THERE.search(frame.filename) for frames in walked for frame in frames)


def control_flow(at: str | None, code: str) -> CaptureError:
    """Refuse it, in a part that is kept whole, too."""
    return CaptureError(
        f"forward calls control flow of torch, which no graph of ops holds: {code}",
        code="BX0199c",
        at=at,
        help=CHOICE,
    )
