"""A bundle for inference -> ONNX files, one per stage, each checked against the stage.

The work is done in a child process: this file imports no torch. The package knows bundles as any
user does, and not how they are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import Child, Task
from bigbrain_fx.plan import Plan, read_plan, require_no_groups

TIME_LIMIT_S = 900.0
TOLERANCE = 1e-5  # of max(1, |value|): kernels of ONNX Runtime round as they like


@dataclass(frozen=True)
class StageFile:
    """One stage as ONNX.

    Attributes:
        stage: its number. device: where the plan runs it.
        file: the ONNX file; None when the stage could not be exported.
        difference: the largest of ONNX Runtime's results from the stage's on real activations, as a
            share of max(1, |value|); None when it was not run.
        other_rows: whether the file also takes other numbers of rows than a micro-batch's.
        problem: what went wrong, with the op and the user's line; empty when nothing did.
        seconds: what the export took.
    """

    stage: int
    device: str
    file: str | None
    difference: float | None
    other_rows: bool
    problem: str
    seconds: float

    def __str__(self) -> str:
        if self.problem:
            return f"stage {self.stage} ({self.device}): {self.problem}"
        rows = "any number of rows" if self.other_rows else "this number of rows only"
        if self.difference is None:
            seen = "not run: onnxruntime is not installed"
        else:
            seen = f"differs by {self.difference:.1e} at most (allowed {TOLERANCE:g})"
        return f"stage {self.stage} ({self.device}): {self.file}, {rows}; {seen}"


@dataclass(frozen=True)
class OnnxExport:
    """Result of `export_onnx`: the folder, and its stages in order."""

    folder: Path
    stages: tuple[StageFile, ...]

    def require_passed(self) -> None:
        """Raise unless every stage was exported and computes what it should.

        Raises:
            CaptureError: names the stages and ops.
        """
        failed = [stage for stage in self.stages if stage.problem]
        if failed:
            raise CaptureError(
                f"{len(failed)} of {len(self.stages)} stages cannot be exported to ONNX",
                code="BX3086",
                notes=tuple(map(str, failed)),
                help="replace that op in the model, or keep the stage as PyTorch: "
                "the other stages' files work without it",
            )

    def __str__(self) -> str:
        return "\n".join(map(str, self.stages))


def export_onnx(
    bundle: str | Path, folder: str | Path, *, time_limit_s: float = TIME_LIMIT_S
) -> OnnxExport:
    """Write each stage of a bundle for inference as ONNX, with a free batch size where it has one.

    `folder/stages.json` says which value goes from which stage to which: they have one name.

    Args:
        bundle: the folder that `split --mode eval` wrote.
        folder: where to write; must not exist, or be empty.
        time_limit_s: how long the child process may take.

    Raises:
        InputError: the bundle trains, the folder is taken, or the time is over.
    """
    source, out = Path(bundle).resolve(), Path(folder)
    plan = read_plan(source)
    _require_usable(plan, out)
    out.mkdir(parents=True, exist_ok=True)
    task = Task(
        module="bigbrain_fx.bundles.onnx_export.child",
        name="the export",
        slow="the export {}",
        slow_help="export on a faster host",
        ended_help="look at its output above",
        limit_s=time_limit_s,
        subject="the export",
        at=str(source),
        libraries=("onnx",),
    )
    wanted = {"bundle": str(source), "folder": str(out.resolve()), "tolerance": TOLERANCE}
    with Child(task, wanted, threads=1) as child:
        stages = cast("Sequence[Mapping[str, Any]]", child.answer()["stages"])
    return OnnxExport(out, tuple(StageFile(**stage) for stage in stages))


def _require_usable(plan: Plan, out: Path) -> None:
    require_no_groups(plan, "export --onnx", "split it with --mode eval and --tensor-parallel 1")
    if plan.mode != "eval":
        raise InputError(
            "this bundle trains, and ONNX is for inference",
            code="BX3087",
            help="split the model with --mode eval --like this bundle, and export that one",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already", code="BX3088", help="give another folder")
