"""Bundles against the unsplit model (`bundle`), and against each other (`comparison`).

It knows the bundle as any user does. Only its child processes import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.verification.bundle import Verification as Verification, verify as verify
    from bigbrain_fx.verification.comparison import (
        Comparison as Comparison,
        Contender as Contender,
        compare as compare,
    )
else:
    __getattr__ = door(
        __name__,
        {
            "bundle": "Verification verify",
            "comparison": "Comparison Contender compare",
        },
    )
