"""Measured times of ops: of what (a signature), where (a machine), and the file that keeps them.

A noun room: plug-ins may read it. It knows no torch, and not how anything is measured.
"""

from bigbrain_fx.profiles.optimizer import OptimizerStep, fit_optimizer
from bigbrain_fx.profiles.signature import (
    Signature,
    TensorArg,
    layout,
    mode_of,
    region_mode,
    signature,
    signatures,
)
from bigbrain_fx.profiles.store import (
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
    "OptimizerStep",
    "ProfileStore",
    "Session",
    "Signature",
    "TensorArg",
    "fit_optimizer",
    "layout",
    "mode_of",
    "region_mode",
    "signature",
    "signatures",
]
