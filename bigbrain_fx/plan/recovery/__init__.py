"""What recovery will cost a plan: how often to snapshot, what that takes, what failures then take.

`choose(plan)` gives the intervals, `closed_form` and `tried` the share of time that is training.
This room knows plans and forecasts. It knows nothing of processes: what it says of them are
`Assumptions`, measured elsewhere.
"""

from bigbrain_fx.plan.recovery.choice import (
    Assumptions as Assumptions,
    DeviceRecovery as DeviceRecovery,
    Recovery as Recovery,
    choose as choose,
)
from bigbrain_fx.plan.recovery.closed import closed_form as closed_form, restart_all as restart_all
from bigbrain_fx.plan.recovery.trial import FailureTrial as FailureTrial, tried as tried
