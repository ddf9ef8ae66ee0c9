"""Fitted models of op times: features, regressions as arrays, and their file.

A noun room: plug-ins may read it. It knows profiles and numpy; it knows no scikit-learn (`fit` has
that) and no graph.
"""

from bigbrain_fx.cost_model.features import Rates, Work, family, matrix, names, shape_columns
from bigbrain_fx.cost_model.model import (
    PHASES,
    CostModel,
    Phase,
    Stages,
    read_model,
    write_model,
)
from bigbrain_fx.cost_model.regressors import LEAF, Kernel, Linear, Regressor, Trees, joined

__all__ = [
    "LEAF",
    "PHASES",
    "CostModel",
    "Kernel",
    "Linear",
    "Phase",
    "Rates",
    "Regressor",
    "Stages",
    "Trees",
    "Work",
    "family",
    "joined",
    "matrix",
    "names",
    "read_model",
    "shape_columns",
    "write_model",
]
