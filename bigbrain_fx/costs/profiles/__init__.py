"""Measured times of ops: of what (a signature), where (a machine), and the file that keeps them.

Plug-ins may read this package. It knows no torch, and not how anything is measured.
"""

from bigbrain_fx.costs.profiles.optimizer import (
    TimedOptimizer as TimedOptimizer,
    fit_optimizer as fit_optimizer,
)
from bigbrain_fx.costs.profiles.signature import (
    Signature as Signature,
    TensorArg as TensorArg,
    layout as layout,
    mode_of as mode_of,
    region_mode as region_mode,
    signature as signature,
    signatures as signatures,
)
from bigbrain_fx.costs.profiles.store import (
    APPLICATION_ID as APPLICATION_ID,
    SCHEMA_VERSION as SCHEMA_VERSION,
    Machine as Machine,
    OpProfile as OpProfile,
    ProfileStore as ProfileStore,
    Session as Session,
)
