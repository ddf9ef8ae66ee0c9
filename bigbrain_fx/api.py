"""The public names: the verbs of the road, its nouns, and the errors that a user may catch.

A name is loaded from its room when it is first used: importing this file imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door, promised

if TYPE_CHECKING:
    from bigbrain_fx.bundles import (
        BatchLine as BatchLine,
        DeviceLostError as DeviceLostError,
        Machine as Machine,
        OnnxExport as OnnxExport,
        Recipe as Recipe,
        Resplit as Resplit,
        Run as Run,
        RunError as RunError,
        RunOptions as RunOptions,
        Session as Session,
        Split as Split,
        StepLine as StepLine,
        Verification as Verification,
        estimate as estimate,
        export_onnx as export_onnx,
        export_weights as export_weights,
        load_weights as load_weights,
        resplit as resplit,
        run as run,
        run_elastic as run_elastic,
        simulate as simulate,
        split as split,
        verify as verify,
    )
    from bigbrain_fx.cli import write_starter as write_starter
    from bigbrain_fx.cluster import (
        parse_cluster as parse_cluster,
        read_cluster as read_cluster,
        schema as schema,
    )
    from bigbrain_fx.core import (
        Cluster as Cluster,
        Costs as Costs,
        Device as Device,
        Estimator as Estimator,
        Forecast as Forecast,
        Graph as Graph,
        Link as Link,
        Op as Op,
        OpCost as OpCost,
        Partitioner as Partitioner,
        Placement as Placement,
        Program as Program,
        Stage as Stage,
        Stages as Stages,
        TensorSpec as TensorSpec,
    )
    from bigbrain_fx.errors import (
        BigBrainError as BigBrainError,
        CaptureError as CaptureError,
        InputError as InputError,
        NoPlanError as NoPlanError,
        ScheduleError as ScheduleError,
        SplitWarning as SplitWarning,
        VerificationError as VerificationError,
    )
    from bigbrain_fx.frontend import (
        Captured as Captured,
        capture as capture,
        leaf as leaf,
        load_onnx as load_onnx,
    )
    from bigbrain_fx.measure import (
        Comparison as Comparison,
        Contender as Contender,
        compare as compare,
        machine as machine,
        probe as probe,
    )
    from bigbrain_fx.plan import (
        Explanation as Explanation,
        Options as Options,
        Plan as Plan,
        Source as Source,
        explain as explain,
        make_plan as make_plan,
        read_plan as read_plan,
    )
else:
    __getattr__ = door(__name__)

NAMES = tuple(sorted(promised(__name__)))
