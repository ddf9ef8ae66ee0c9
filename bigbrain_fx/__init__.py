"""Split a PyTorch model over the devices of a cluster and write plain Python for each.

    import bigbrain_fx as bb

    made = bb.split("model.py", "cluster.json", "bundle", bb.Options(micro_batches=4))
    print(bb.explain(made.plan))
    done = bb.run(made.bundle, bb.RunOptions(steps=30))
    bb.verify(made.bundle).require_passed()

Public names are loaded when they are first used: importing this package imports no torch, and
neither does planning; `capture` of a module in memory does.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigbrain_fx.capture.leaf import leaf
    from bigbrain_fx.capture.trace import Captured, capture
    from bigbrain_fx.checkpoints import export_weights, load_weights
    from bigbrain_fx.cluster import parse_cluster, read_cluster, schema
    from bigbrain_fx.compare import Comparison, Contender, compare
    from bigbrain_fx.compile import Split, estimate, simulate, split
    from bigbrain_fx.core import (
        Cluster,
        Costs,
        Device,
        Estimator,
        Forecast,
        Graph,
        Link,
        Op,
        OpCost,
        Partitioner,
        Placement,
        Program,
        Stage,
        Stages,
        TensorSpec,
    )
    from bigbrain_fx.doctor import probe
    from bigbrain_fx.elastic import run_elastic
    from bigbrain_fx.errors import (
        BigBrainError,
        CaptureError,
        InputError,
        NoPlanError,
        ScheduleError,
        VerificationError,
    )
    from bigbrain_fx.explain import Explanation, explain
    from bigbrain_fx.launch import (
        BatchLine,
        DeviceLostError,
        Run,
        RunError,
        RunOptions,
        StepLine,
        run,
    )
    from bigbrain_fx.onnx_in import load_onnx
    from bigbrain_fx.onnx_out import OnnxExport, export_onnx
    from bigbrain_fx.plan import Options, Plan, Source, make_plan, read_plan
    from bigbrain_fx.resplit import Resplit, resplit
    from bigbrain_fx.starter import write_starter
    from bigbrain_fx.verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BatchLine",
    "BigBrainError",
    "CaptureError",
    "Captured",
    "Cluster",
    "Comparison",
    "Contender",
    "Costs",
    "Device",
    "DeviceLostError",
    "Estimator",
    "Explanation",
    "Forecast",
    "Graph",
    "InputError",
    "Link",
    "NoPlanError",
    "OnnxExport",
    "Op",
    "OpCost",
    "Options",
    "Partitioner",
    "Placement",
    "Plan",
    "Program",
    "Resplit",
    "Run",
    "RunError",
    "RunOptions",
    "ScheduleError",
    "Source",
    "Split",
    "Stage",
    "Stages",
    "StepLine",
    "TensorSpec",
    "Verification",
    "VerificationError",
    "__version__",
    "capture",
    "compare",
    "estimate",
    "explain",
    "export_onnx",
    "export_weights",
    "leaf",
    "load_onnx",
    "load_weights",
    "make_plan",
    "parse_cluster",
    "probe",
    "read_cluster",
    "read_plan",
    "resplit",
    "run",
    "run_elastic",
    "schema",
    "simulate",
    "split",
    "verify",
    "write_starter",
]

_ROOMS = {
    "capture.leaf": "leaf",
    "capture.trace": "Captured capture",
    "checkpoints": "export_weights load_weights",
    "cluster": "parse_cluster read_cluster schema",
    "compare": "Comparison Contender compare",
    "compile": "Split estimate simulate split",
    "core": "Cluster Costs Device Estimator Forecast Graph Link Op OpCost Partitioner Placement "
    "Program Stage Stages TensorSpec",
    "doctor": "probe",
    "elastic": "run_elastic",
    "errors": "BigBrainError CaptureError InputError NoPlanError ScheduleError VerificationError",
    "explain": "Explanation explain",
    "launch": "BatchLine DeviceLostError Run RunError RunOptions StepLine run",
    "onnx_in": "load_onnx",
    "onnx_out": "OnnxExport export_onnx",
    "plan": "Options Plan Source make_plan read_plan",
    "resplit": "Resplit resplit",
    "starter": "write_starter",
    "verify": "Verification verify",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}


if not TYPE_CHECKING:  # a checker would take any name then

    def __getattr__(name: str) -> object:
        """Load a public name from its room."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package: `bigbrain_fx.verify` is the verb, though a room of that name exists, too.

    Python binds every imported submodule to its package; without this, what `bigbrain_fx.verify`
    means would depend on what was imported before. `from bigbrain_fx.verify import ...` works as
    ever.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
