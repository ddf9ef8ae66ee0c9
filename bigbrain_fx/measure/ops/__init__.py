"""Measure the ops of a model on this host: model file -> profile database.

This package knows capture, the runtime's habits and doctor's measurements; it knows no clusters, no
plans and no terminal. Only its child process imports torch.
"""

from bigbrain_fx.measure.ops.session import (
    TWENTY_OPS as TWENTY_OPS,
    MeasuredRows as MeasuredRows,
    Profiled as Profiled,
    ProfileOptions as ProfileOptions,
    profile as profile,
)
