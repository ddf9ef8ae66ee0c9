"""Errors that a library's own code raises under a trace, which never name what the user wrote.

This file knows their words and files; it knows nothing of the model.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.translation.sources import with_causes

_KEPT_FROM_COMPILERS = "Non-recursive torch.compiler.disable"


def by_library(error: BaseException, at: str | None, code: str) -> CaptureError | None:
    """Explain an error that copying a module raised, or a function kept from torch's compiler."""
    causes = list(with_causes(error))
    if any(_KEPT_FROM_COMPILERS in str(cause) for cause in causes):
        return CaptureError(
            "a function of the model has @torch.compiler.disable(recursive=False), which "
            "no trace goes through",
            code="BX0199a",
            help="write @torch.compiler.disable, or leave it out: a bundle's stages are not "
            "compiled unless --compile says so",
        )
    walked = (traceback.extract_tb(cause.__traceback__) for cause in causes)
    files = {Path(frame.filename).name for frames in walked for frame in frames}
    if "copy.py" in files:
        return CaptureError(
            "forward copies a module or a tensor with the module copy, which looks at "
            "memory that a trace has not",
            code="BX0199b",
            at=at,
            notes=(code,) if code else (),
            help="x.clone() for a tensor; a module with the weights of now, without gradient: "
            "torch.func.functional_call(part, {n: p.detach() for n, p in part.named_parameters()}, "
            "(x,)); one that stays as it is: copy it in __init__",
        )
    return None
