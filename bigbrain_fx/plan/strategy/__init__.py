"""One space of strategies, one bound, one loop: which replicas, groups and shares are planned.

    options left open ──space──▶ Strategy ──bound──▶ in order ──choose──▶ the best Plan

The caller's function makes the plan of one strategy: this package places no op.
"""

from __future__ import annotations

from bigbrain_fx.plan.strategy.choose import (
    is_open as is_open,
    plan_strategies as plan_strategies,
)
from bigbrain_fx.plan.strategy.strategy import Bound as Bound
