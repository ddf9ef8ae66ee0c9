"""Go on training on other devices: a bundle and its last commit -> a bundle for another cluster.

    plan.json ──its graph──▶ replan ──▶ write_bundle ──▶ NEW/device_d0.py, ...
    commit of step t ──by parameter name──▶ NEW/weights/ and NEW/commits/commit-t

The package joins plans, bundles and commits. It imports no torch and runs no model file. It maps
files instead of reading them: memory has the tensors of one device at most.
"""

from bigbrain_fx.bundles.resplitting.moving import Resplit as Resplit, resplit as resplit
from bigbrain_fx.bundles.resplitting.named import Named as Named
from bigbrain_fx.bundles.resplitting.new_commits import (
    commit_of_caller as commit_of_caller,
    commit_of_run as commit_of_run,
)
from bigbrain_fx.bundles.resplitting.newest import newest_state as newest_state
