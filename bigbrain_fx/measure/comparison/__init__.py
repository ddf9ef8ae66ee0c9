"""Compare: one model, one cluster, several ways to split it, side by side.

This room joins planning, emission and launching, each through its door; how a plan is found, what a
bundle looks like and how its processes talk, it does not know.
"""

from bigbrain_fx.measure.comparison.agreement import Agreement as Agreement
from bigbrain_fx.measure.comparison.contender import (
    Comparison as Comparison,
    Contender as Contender,
)
from bigbrain_fx.measure.comparison.contest import compare as compare
