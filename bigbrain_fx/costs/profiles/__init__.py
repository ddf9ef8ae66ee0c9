"""Measured times of ops: of what (a signature), where (a machine), and the file that keeps them.

A noun room: plug-ins may read it. It knows no torch, and not how anything is measured.
"""

from bigbrain_fx.costs.profiles.optimizer import TimedOptimizer, fit_optimizer
from bigbrain_fx.costs.profiles.signature import (
    Signature,
    TensorArg,
    layout,
    mode_of,
    region_mode,
    signature,
    signatures,
)
from bigbrain_fx.costs.profiles.store import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    Machine,
    OpProfile,
    ProfileStore,
    Session,
)

__all__ = [
    "APPLICATION_ID",
    "SCHEMA_VERSION",
    "Machine",
    "OpProfile",
    "ProfileStore",
    "Session",
    "Signature",
    "TensorArg",
    "TimedOptimizer",
    "fit_optimizer",
    "layout",
    "mode_of",
    "region_mode",
    "signature",
    "signatures",
]
