"""A bundle for inference -> ONNX files, one per stage, each checked against the stage.

The work is done in a child process: this file imports no torch. The room knows bundles as any user
does; it knows nothing of how they are made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.plan import Plan, read_plan

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
    """What `export_onnx` wrote: the folder, and its stages in order."""

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
    with tempfile.TemporaryDirectory(prefix="bigbrain-fx-onnx-") as scratch:
        answer = Path(scratch) / "answer.json"
        wanted = {"bundle": str(source), "folder": str(out.resolve()), "answer": str(answer)}
        _run_child({**wanted, "tolerance": TOLERANCE}, time_limit_s)
        found = json.loads(answer.read_text())
    if "internal" in found:
        raise RuntimeError(f"the export failed in its child process\n{found['internal']}")
    return OnnxExport(out, tuple(StageFile(**stage) for stage in found["stages"]))


def _require_usable(plan: Plan, out: Path) -> None:
    if plan.mode != "eval":
        raise InputError(
            "this bundle trains, and ONNX is for inference",
            help="split the model with --mode eval --like this bundle, and export that one",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already", help="give another folder")


def _run_child(wanted: dict[str, Any], time_limit_s: float) -> None:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "bigbrain_fx.onnx_out.child", json.dumps(wanted)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=time_limit_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"the export took longer than {time_limit_s:g} s", help="export on a faster host"
        ) from error
    if done.returncode:
        raise InputError(
            f"the export ended its process ({done.returncode})",
            notes=tuple(done.stderr.splitlines()[-5:]),
            help="run `python infer.py --in-process --steps 1` in the bundle first",
        )
