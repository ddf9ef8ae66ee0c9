"""Plan -> bundle: plain Python that a person would keep, weights, and a README.

This room knows the plan and how code is written. It imports no torch and knows no processes.
"""

from bigbrain_fx.emit.files.bundle import check_out, cut_weights, write_bundle
from bigbrain_fx.emit.files.copied import (
    GROUPED,
    OFFLOADED,
    REPLICATED,
    SUPERVISED,
    runtime_files,
)
from bigbrain_fx.emit.files.outputs import output_dims
from bigbrain_fx.emit.files.texts import bundle_texts, stage_texts, weight_files, weight_index
from bigbrain_fx.emit.modules.classes import StageText

__all__ = [
    "GROUPED",
    "OFFLOADED",
    "REPLICATED",
    "SUPERVISED",
    "StageText",
    "bundle_texts",
    "check_out",
    "cut_weights",
    "output_dims",
    "runtime_files",
    "stage_texts",
    "weight_files",
    "weight_index",
    "write_bundle",
]
