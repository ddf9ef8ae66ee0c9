"""Fitted models of op times: features, regressions as arrays, and their file.

A noun room: plug-ins may read it. It knows profiles and numpy; it knows no scikit-learn (`fit` has
that) and no graph.
"""

from bigbrain_fx.costs.model.features import (
    OpWork as OpWork,
    PlaceRates as PlaceRates,
    family as family,
    matrix as matrix,
    names as names,
    shape_columns as shape_columns,
)
from bigbrain_fx.costs.model.model import (
    PHASES as PHASES,
    CostModel as CostModel,
    Phase as Phase,
    PhaseModel as PhaseModel,
    read_model as read_model,
    write_model as write_model,
)
from bigbrain_fx.costs.model.regressors import (
    LEAF as LEAF,
    Floats as Floats,
    Kernel as Kernel,
    Linear as Linear,
    Regressor as Regressor,
    Trees as Trees,
    joined as joined,
)
