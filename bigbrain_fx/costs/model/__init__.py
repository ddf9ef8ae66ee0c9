"""Fitted models of op times: features, regressions as arrays, and their file.

A noun room: plug-ins may read it. It knows profiles and numpy; it knows no scikit-learn (`fit` has
that) and no graph.
"""

from bigbrain_fx.costs.model.features import (
    OpWork,
    PlaceRates,
    family,
    matrix,
    names,
    shape_columns,
)
from bigbrain_fx.costs.model.model import (
    PHASES,
    CostModel,
    Phase,
    PhaseModel,
    read_model,
    write_model,
)
from bigbrain_fx.costs.model.regressors import (
    LEAF,
    Floats,
    Kernel,
    Linear,
    Regressor,
    Trees,
    joined,
)

__all__ = [
    "LEAF",
    "PHASES",
    "CostModel",
    "Floats",
    "Kernel",
    "Linear",
    "OpWork",
    "Phase",
    "PhaseModel",
    "PlaceRates",
    "Regressor",
    "Trees",
    "family",
    "joined",
    "matrix",
    "names",
    "read_model",
    "shape_columns",
    "write_model",
]
