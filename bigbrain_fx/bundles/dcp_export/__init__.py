"""A bundle's weights, or a commit of its run -> a folder that torch.distributed.checkpoint reads.

The writing is torch's own, in a child process: this file imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bigbrain_fx.bundles.going_on import export_training
from bigbrain_fx.bundles.weights_io import export_weights
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.frontend import Child, Task
from bigbrain_fx.plan import read_plan, require_no_overlap
from bigbrain_fx.weights import scratch_folder

TIME_LIMIT_S = 3600.0
_MODULE = "bigbrain_fx.bundles.dcp_export.child"


@dataclass(frozen=True)
class DcpExport:
    """Result of an export: folder, number of tensors, and number of steps; None: weights."""

    folder: Path
    tensors: int
    step: int | None
    warnings: tuple[str, ...] = ()


def export_dcp(
    bundle: str | Path,
    folder: str | Path,
    *,
    weights: str | Path | None = None,
    commits: str | Path | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> DcpExport:
    """Write {"model": ..., "optimizer": ..., "step": ...} for torch.distributed.checkpoint.load.

    Names are those of `get_state_dict(model, optimizer)`, nested and flattened, and the model's
    also without "model.", as torchtitan has them: all lead to the same bytes.

    Args:
        bundle: the folder that `split` wrote.
        folder: where to write; must not exist, or be empty.
        weights: what `run --save` wrote; the bundle's own weights when left out.
        commits: the folder of `--checkpoint-dir`: its newest checkpoint, with optimizer state.
        time_limit_s: how long the child process may take.

    Raises:
        InputError: as `export_weights` and `export_training`; or the folder is taken.
    """
    out = Path(folder)
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists already", code="BX3024", help="give another --dcp")
    if weights is not None and commits is not None:
        raise InputError(
            "expected one of --weights and --checkpoint-dir", code="BX3025", help="leave one out"
        )
    help_ = "free some space, or give another --dcp"
    with os_error_as(f"cannot write {out}", code="BX3026", at=out, help=help_):
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out) as scratch:
            return _written(Path(bundle), out, scratch, weights, commits, time_limit_s)


def _written(
    bundle: Path,
    out: Path,
    scratch: Path,
    weights: str | Path | None,
    commits: str | Path | None,
    time_limit_s: float,
) -> DcpExport:
    model, optimizer, step = scratch / "model.safetensors", None, None
    warnings: tuple[str, ...] = ()
    if commits is None:
        export_weights(bundle, model, weights=weights)
    else:
        help_ = "export what `run --save` wrote: --weights"
        require_no_overlap(read_plan(bundle), "--dcp with --checkpoint-dir", help_)
        optimizer = scratch / "optimizer.safetensors"
        done = export_training(bundle, model, optimizer, commits)
        step, warnings = done.step, done.warnings
        if done.has_scaler:
            warnings += ("the loss scale is not in the folder: a GradScaler there begins anew",)
    task = Task(
        module=_MODULE,
        name="the export",
        slow="the export {}",
        slow_help="write to a faster disk",
        ended_help="look at its output above",
        limit_s=time_limit_s,
        subject="the export",
        at=str(bundle),
    )
    made = scratch / "dcp"
    files = {"model": model, "folder": made, "optimizer": optimizer}
    wanted = {name: str(path.resolve()) for name, path in files.items() if path is not None}
    with Child(task, wanted, threads=1) as child:
        tensors = cast("int", child.answer()["tensors"])
    made.replace(out)
    return DcpExport(out, tensors, step, warnings)
