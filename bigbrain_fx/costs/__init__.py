"""Times of ops (`profiles`) and of layers (`layer_times`), models fitted to ops (`model`, `fit`).

`correct` mends a model by what a new device took. Estimators may read it. It knows no planner and
no torch; `fit` alone knows scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.costs.correct import correct_file as correct_file
    from bigbrain_fx.costs.fit import DEFAULT as DEFAULT, fit_file as fit_file
    from bigbrain_fx.costs.layer_times import (
        LOSS as LOSS,
        Layer as Layer,
        LayerTime as LayerTime,
        LayerTimes as LayerTimes,
        read_layer_times as read_layer_times,
    )
    from bigbrain_fx.costs.model import (
        PHASES as PHASES,
        SHIPPED as SHIPPED,
        CostModel as CostModel,
        OpWork as OpWork,
        Phase as Phase,
        device_of as device_of,
        read_model as read_model,
    )
    from bigbrain_fx.costs.profiles import (
        Machine as Machine,
        OpProfile as OpProfile,
        ProfileStore as ProfileStore,
        Session as Session,
        Signature as Signature,
        TimedOptimizer as TimedOptimizer,
        fit_optimizer as fit_optimizer,
        mode_of as mode_of,
        region_mode as region_mode,
        signature as signature,
        signatures as signatures,
    )
else:
    __getattr__ = door(__name__)
