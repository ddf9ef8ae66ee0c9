"""The frozen types that travel along the road, and the two plug-in protocols.

This room imports no torch and nothing of ours: a plan can be read, compared and simulated on a
machine that has neither a model nor a GPU.

    Graph ──▶ Costs ──▶ Placement ──▶ Stages ──▶ Programs ──▶ Forecast        (together: a Plan)
"""

from bigbrain_fx.core.cluster import (
    BLAS_BYTES,
    BLAS_BYTES_FROM_HOPPER_ON,
    Cluster,
    Device,
    Host,
    Link,
    Overheads,
    blas_bytes,
)
from bigbrain_fx.core.doors import door
from bigbrain_fx.core.graph import (
    Arg,
    CallArguments,
    Const,
    Graph,
    Input,
    ModuleCall,
    Op,
    Param,
    ParamRef,
    Ref,
    Saves,
    TensorSpec,
    leaves,
)
from bigbrain_fx.core.programs import (
    Backward,
    BackwardWeight,
    Compute,
    DeviceForecast,
    Forecast,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Slice,
)
from bigbrain_fx.core.protocols import Estimator, Partitioner
from bigbrain_fx.core.showing import Shown
from bigbrain_fx.core.sizes import DTYPE_BYTES, Dim, size_of
from bigbrain_fx.core.stages import (
    Bucket,
    Costs,
    Edge,
    EdgeKind,
    OpCost,
    Placement,
    Replica,
    Stage,
    Stages,
    SumOrder,
    ZeroStage,
    sums_each,
)
from bigbrain_fx.core.version import VERSION

__all__ = [
    "BLAS_BYTES",
    "BLAS_BYTES_FROM_HOPPER_ON",
    "DTYPE_BYTES",
    "VERSION",
    "Arg",
    "Backward",
    "BackwardWeight",
    "Bucket",
    "CallArguments",
    "Cluster",
    "Compute",
    "Const",
    "Costs",
    "Device",
    "DeviceForecast",
    "Dim",
    "Edge",
    "EdgeKind",
    "Estimator",
    "Forecast",
    "Forward",
    "Graph",
    "Host",
    "Input",
    "Instruction",
    "Link",
    "ModuleCall",
    "Op",
    "OpCost",
    "OptimizerStep",
    "Overheads",
    "Param",
    "ParamRef",
    "Partitioner",
    "Placement",
    "Program",
    "Recv",
    "Ref",
    "Replica",
    "Saves",
    "Send",
    "Shown",
    "Slice",
    "Stage",
    "Stages",
    "SumOrder",
    "TensorSpec",
    "ZeroStage",
    "blas_bytes",
    "door",
    "leaves",
    "size_of",
    "sums_each",
]
