"""Fitted models of op times: features, regressions as arrays, and their file.

Plug-ins may read this package. It knows profiles, numpy and, by its registered name, the
estimator whose times are corrected; it knows no scikit-learn (`fit` has that).
"""

from bigbrain_fx.costs.model.expected import (
    LEAST_S as LEAST_S,
    device_of as device_of,
    expected_s as expected_s,
    graph_of as graph_of,
)
from bigbrain_fx.costs.model.features import (
    PHASES as PHASES,
    Floats as Floats,
    OpWork as OpWork,
    Phase as Phase,
    PlaceRates as PlaceRates,
    family as family,
    matrix as matrix,
    names as names,
)
from bigbrain_fx.costs.model.model import (
    SHIPPED as SHIPPED,
    Correction as Correction,
    CostModel as CostModel,
    PhaseModel as PhaseModel,
    read_model as read_model,
    write_model as write_model,
)
from bigbrain_fx.costs.model.regressors import (
    LEAF as LEAF,
    Linear as Linear,
    Regressor as Regressor,
    Trees as Trees,
)
