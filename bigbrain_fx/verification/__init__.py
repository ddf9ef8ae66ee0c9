"""Bundles against the unsplit model (`bundle`), and against each other (`comparison`).

`sharding` holds shards inside an op against the graph that they are of; it imports torch itself.

It knows the bundle as any user does. Else only its child processes import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.verification.bundle import Verification as Verification, verify as verify
    from bigbrain_fx.verification.comparison import (
        Comparison as Comparison,
        Contender as Contender,
        compare as compare,
    )
    from bigbrain_fx.verification.sharding import (
        ShardAgreement as ShardAgreement,
        agree as agree,
        own_rounding as own_rounding,
        tried_axes as tried_axes,
    )
else:
    __getattr__ = door(__name__)
