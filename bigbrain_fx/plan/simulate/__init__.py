"""Programs x StageCosts -> Forecast, by running the very programs that the devices will run.

`clock` computes times, `forecast` adds busy seconds and memory, `trace` draws them. This package
imports no torch, and knows neither how programs are planned nor how they are written as text.
"""

from bigbrain_fx.plan.simulate.forecast import (
    STEPS as STEPS,
    chrome_trace as chrome_trace,
    in_a_row as in_a_row,
    simulate as simulate,
    steps_in_a_row as steps_in_a_row,
)
