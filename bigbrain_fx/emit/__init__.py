"""Plan -> bundle: plain Python that a person would keep, weights, and a README.

This room knows the plan and how code is written. It imports no torch and knows no processes.
"""

from bigbrain_fx.emit.bundle import check_out, write_bundle
from bigbrain_fx.emit.classes import StageText
from bigbrain_fx.emit.outputs import output_dims
from bigbrain_fx.emit.texts import bundle_texts, stage_texts, weight_files

__all__ = [
    "StageText",
    "bundle_texts",
    "check_out",
    "output_dims",
    "stage_texts",
    "weight_files",
    "write_bundle",
]
