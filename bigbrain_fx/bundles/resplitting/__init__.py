"""Go on training on other devices: a bundle and its last commit -> a bundle for another cluster.

    plan.json ──its graph──▶ replan ──▶ write_bundle ──▶ NEW/device_d0.py, ...
    commit of step t ──by parameter name──▶ NEW/weights/ and NEW/commits/commit-t

This room joins plans, bundles and commits. It imports no torch, runs no model file, and maps files
instead of reading them: what one device has is the most that is in memory at a time.
"""

from bigbrain_fx.bundles.resplitting.moving import Resplit as Resplit, resplit as resplit
from bigbrain_fx.bundles.resplitting.named import Named as Named
from bigbrain_fx.bundles.resplitting.newest import newest_state as newest_state
