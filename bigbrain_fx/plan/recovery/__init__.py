"""What recovery will cost a plan: how often to snapshot, what that takes, what failures then take.

`choose(plan)` gives the intervals, `closed_form` and `tried` the share of time that is training.
This room knows plans and forecasts. It knows nothing of processes: what it says of them are
`Assumptions`, measured elsewhere.
"""

from bigbrain_fx.plan.recovery.choice import Assumptions, DeviceRecovery, Recovery, choose
from bigbrain_fx.plan.recovery.closed import closed_form, restart_all
from bigbrain_fx.plan.recovery.trial import FailureTrial, tried

__all__ = [
    "Assumptions",
    "DeviceRecovery",
    "FailureTrial",
    "Recovery",
    "choose",
    "closed_form",
    "restart_all",
    "tried",
]
