"""What recovery will cost a plan: how often to snapshot, what that takes, what failures then take.

`choose(plan)` gives the intervals, `closed_form` and `tried` the share of time that is training.
This room knows plans and forecasts. It knows nothing of processes: what it says of them are
`Assumptions`, measured elsewhere.
"""

from bigbrain_fx.recovery.choice import Assumptions, DeviceRecovery, Recovery, choose
from bigbrain_fx.recovery.closed import closed_form, restart_all
from bigbrain_fx.recovery.trial import Trial, tried

__all__ = [
    "Assumptions",
    "DeviceRecovery",
    "Recovery",
    "Trial",
    "choose",
    "closed_form",
    "restart_all",
    "tried",
]
