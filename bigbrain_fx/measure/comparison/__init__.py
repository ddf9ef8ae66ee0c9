"""Compare: one model, one cluster, several ways to split it, side by side.

This package joins planning, emission and launching by their public names. It does not know how a
plan is found, the layout of a bundle, or the messages of its processes.
"""

from bigbrain_fx.measure.comparison.contender import (
    Comparison as Comparison,
    Contender as Contender,
)
from bigbrain_fx.measure.comparison.contest import compare as compare
