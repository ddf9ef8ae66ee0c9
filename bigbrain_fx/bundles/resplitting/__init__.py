"""Go on training on other devices: a bundle and its last commit -> a bundle for another cluster.

    plan.json ──its graph──▶ replan ──▶ write_bundle ──▶ NEW/device_d0.py, ...
    commit of step t ──by parameter name──▶ NEW/weights/ and NEW/commits/commit-t

The package joins plans, bundles and commits. The package imports no torch, runs no model file, and
maps files instead of reading them: the tensors of one device are the most in memory at a time.
"""

from bigbrain_fx.bundles.resplitting.moving import Resplit as Resplit, resplit as resplit
from bigbrain_fx.bundles.resplitting.named import Named as Named
from bigbrain_fx.bundles.resplitting.newest import newest_state as newest_state
