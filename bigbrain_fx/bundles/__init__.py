"""Operations on bundles: make, run, move to other devices, set weights, export.

The package joins the others: `compile` is the path from model to bundle. The package starts its own
processes and imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.bundles.compile import (
        TIME_LIMIT_S as TIME_LIMIT_S,
        Split as Split,
        checked as checked,
        estimate as estimate,
        simulate as simulate,
        split as split,
    )
    from bigbrain_fx.bundles.dcp_export import DcpExport as DcpExport, export_dcp as export_dcp
    from bigbrain_fx.bundles.elastic import run_elastic as run_elastic
    from bigbrain_fx.bundles.found import (
        captured_model as captured_model,
        require_optimizer as require_optimizer,
        source_of as source_of,
        with_tried_rules as with_tried_rules,
    )
    from bigbrain_fx.bundles.found_model import (
        FoundModel as FoundModel,
        Loss as Loss,
        Recipe as Recipe,
    )
    from bigbrain_fx.bundles.going_on import (
        export_commit as export_commit,
        export_training as export_training,
        list_commits as list_commits,
        rollback as rollback,
    )
    from bigbrain_fx.bundles.launch import (
        BAD_INPUT as BAD_INPUT,
        DEFAULT_STEPS as DEFAULT_STEPS,
        GRACE_S as GRACE_S,
        PEER_LOST as PEER_LOST,
        STARTERS as STARTERS,
        BatchLine as BatchLine,
        Command as Command,
        DeviceLostError as DeviceLostError,
        Line as Line,
        Process as Process,
        Run as Run,
        RunError as RunError,
        RunOptions as RunOptions,
        Script as Script,
        Spawn as Spawn,
        Status as Status,
        StepLine as StepLine,
        can_supervise as can_supervise,
        commands as commands,
        entry as entry,
        environment as environment,
        failure as failure,
        free_port as free_port,
        hosts as hosts,
        is_lean as is_lean,
        launch_script as launch_script,
        metrics_at as metrics_at,
        popen as popen,
        read_status as read_status,
        require_compilers as require_compilers,
        require_free as require_free,
        require_gpus as require_gpus,
        require_not_lean as require_not_lean,
        run as run,
        run_folder as run_folder,
        secret_command as secret_command,
    )
    from bigbrain_fx.bundles.machines import Machine as Machine
    from bigbrain_fx.bundles.onnx_export import OnnxExport as OnnxExport, export_onnx as export_onnx
    from bigbrain_fx.bundles.packing import (
        pack as pack,
        require_free_parts as require_free_parts,
        write_parts as write_parts,
    )
    from bigbrain_fx.bundles.rehearsing import CAPTURE_CHILD as CAPTURE_CHILD
    from bigbrain_fx.bundles.resplitting import Resplit as Resplit, resplit as resplit
    from bigbrain_fx.bundles.sessions import Session as Session
    from bigbrain_fx.bundles.validating import Validation as Validation, validations as validations
    from bigbrain_fx.bundles.verifying import Verification as Verification, verify as verify
    from bigbrain_fx.bundles.weights_io import (
        export_weights as export_weights,
        load_weights as load_weights,
    )
else:
    __getattr__ = door(__name__)
