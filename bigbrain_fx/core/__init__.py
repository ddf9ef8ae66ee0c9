"""Frozen types of the data flow, and the two plug-in protocols.

This package imports no torch and no other package of ours. A plan can be read, compared and
simulated on a machine without a model or a GPU.

    Graph ──▶ Costs ──▶ Placement ──▶ Stages ──▶ Programs ──▶ Forecast        (together: a Plan)
"""

from bigbrain_fx.core.aliases import alias_package as alias_package
from bigbrain_fx.core.arguments import (
    Arg as Arg,
    Const as Const,
    ParamRef as ParamRef,
    Ref as Ref,
    leaves as leaves,
)
from bigbrain_fx.core.cluster import (
    BLAS_BYTES as BLAS_BYTES,
    BLAS_BYTES_FROM_HOPPER_ON as BLAS_BYTES_FROM_HOPPER_ON,
    Cluster as Cluster,
    Device as Device,
    DeviceStore as DeviceStore,
    Host as Host,
    Link as Link,
    Overheads as Overheads,
    Period as Period,
    Zone as Zone,
    blas_bytes as blas_bytes,
)
from bigbrain_fx.core.costs import Costs as Costs, OpCost as OpCost
from bigbrain_fx.core.doors import door as door, promised as promised
from bigbrain_fx.core.graph import (
    INT8_MOST as INT8_MOST,
    OPAQUE_MODULE as OPAQUE_MODULE,
    OPAQUE_STEP as OPAQUE_STEP,
    CallArguments as CallArguments,
    Graph as Graph,
    Input as Input,
    ModuleCall as ModuleCall,
    Op as Op,
    Param as Param,
    Saves as Saves,
    quantised_weights as quantised_weights,
)
from bigbrain_fx.core.json_once import once as once
from bigbrain_fx.core.kernels import (
    KERNEL as KERNEL,
    KERNELS as KERNELS,
    KernelShape as KernelShape,
)
from bigbrain_fx.core.loss_count import ROW_COUNTS as ROW_COUNTS, LossCount as LossCount
from bigbrain_fx.core.modules import module_of as module_of, run_module as run_module
from bigbrain_fx.core.optimizer_data import (
    OptimizerData as OptimizerData,
    Option as Option,
    ParameterGroup as ParameterGroup,
)
from bigbrain_fx.core.placement import (
    Asynchronous as Asynchronous,
    Crossed as Crossed,
    Offloaded as Offloaded,
    Placement as Placement,
    Replica as Replica,
    SumOrder as SumOrder,
    TensorParallel as TensorParallel,
    ZeroStage as ZeroStage,
    sums_each as sums_each,
)
from bigbrain_fx.core.programs import (
    Backward as Backward,
    BackwardWeight as BackwardWeight,
    Compute as Compute,
    DeviceForecast as DeviceForecast,
    Forecast as Forecast,
    Forward as Forward,
    Instruction as Instruction,
    OptimizerStep as OptimizerStep,
    Program as Program,
    Recv as Recv,
    Send as Send,
    Slice as Slice,
)
from bigbrain_fx.core.protocols import (
    Estimator as Estimator,
    GroupEstimator as GroupEstimator,
    Partitioner as Partitioner,
)
from bigbrain_fx.core.shards import (
    SENT_BACKWARD as SENT_BACKWARD,
    SENT_FORWARD as SENT_FORWARD,
    Axis as Axis,
    Exchange as Exchange,
    ExchangeKind as ExchangeKind,
    Inner as Inner,
    Place as Place,
    RuleTrial as RuleTrial,
    Shard as Shard,
    Sharded as Sharded,
)
from bigbrain_fx.core.showing import Shown as Shown
from bigbrain_fx.core.sizes import (
    DTYPE_BYTES as DTYPE_BYTES,
    Dim as Dim,
    dense_strides as dense_strides,
    factor as factor,
    length_name as length_name,
    longest as longest,
    memory_order as memory_order,
    plus as plus,
    size_of as size_of,
    times as times,
)
from bigbrain_fx.core.stages import (
    Bucket as Bucket,
    Edge as Edge,
    EdgeKind as EdgeKind,
    SavedInStore as SavedInStore,
    Stage as Stage,
    Stages as Stages,
    Statistics as Statistics,
)
from bigbrain_fx.core.tensor_spec import TensorSpec as TensorSpec, memory_format as memory_format
from bigbrain_fx.core.timing import Stopwatch as Stopwatch, Timing as Timing
from bigbrain_fx.core.version import VERSION as VERSION
from bigbrain_fx.core.words import (
    micro_text as micro_text,
    shortened as shortened,
    words as words,
)
from bigbrain_fx.core.work import (
    flops as flops,
    moved as moved,
    nbytes as nbytes,
)
