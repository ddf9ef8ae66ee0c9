"""Programs x StageCosts -> Forecast, by running the very programs that the devices will run.

`clock` says when, `forecast` adds who is busy and what is held, `trace` draws it. This room imports
no torch and knows nothing of how programs came to be, or of how they are written as text.
"""

from bigbrain_fx.plan.simulate.forecast import (
    STEPS as STEPS,
    chrome_trace as chrome_trace,
    in_a_row as in_a_row,
    simulate as simulate,
    steps_in_a_row as steps_in_a_row,
)
