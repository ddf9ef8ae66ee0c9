"""A folder of torch.distributed.checkpoint -> a model's tensors and its optimizer's, in one file.

    .metadata, __0_0.distcp, ...  ─▶  a child process with torch  ─▶  dcp.safetensors, facts

Torch reads its own format there; this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bigbrain_fx.frontend import Child, Task
from bigbrain_fx.weights import Stored, read_header

METADATA = ".metadata"
MODEL, OPTIMIZER = "model:", "optimizer:"  # how names begin in the file
TIME_LIMIT_S = 3600.0


@dataclass(frozen=True)
class DcpTensors:
    """Contents of a checkpoint, as far as they are a model's and its optimizer's.

    Attributes:
        model: the state dict, by the names there.
        optimizer: (kind, parameter) -> the tensor, those with dimensions.
        facts: hyperparameters, and numbers by parameter, in the form of a commit's.
        step: how many are done.
    """

    model: Mapping[str, Stored]
    optimizer: Mapping[tuple[str, str], Stored]
    facts: Mapping[str, Any]
    step: int


def is_dcp(path: str | Path) -> bool:
    """Whether a path is a folder of torch.distributed.checkpoint."""
    return (Path(path) / METADATA).is_file()


def dcp_tensors(
    folder: Path, names: Mapping[str, str], file: Path, *, weights_alone: bool = False
) -> DcpTensors:
    """Write the tensors of a model and its optimizer into one safetensors file.

    Args:
        folder: what dcp.save wrote.
        names: of parameters and buffers -> the canonical name.
        file: to write; keep it while the result is needed.
        weights_alone: leave the optimizer out.

    Raises:
        InputError: it is no such checkpoint, or it lacks the optimizer's state or the number of
            steps; or the disk is full.
    """
    task = Task(
        module="bigbrain_fx.bundles.dcp_import.child",
        name="the import",
        slow="the import {}",
        slow_help="copy the checkpoint to a faster disk",
        ended_help="look at its output above",
        limit_s=TIME_LIMIT_S,
        subject="the checkpoint",
        at=str(folder),
    )
    wanted = {"folder": str(folder.resolve()), "file": str(file.resolve()), "names": dict(names)}
    with Child(task, {**wanted, "weights_alone": weights_alone}, threads=1) as child:
        told = cast("dict[str, Any]", child.answer())
    found = read_header(file)
    model = {n.removeprefix(MODEL): t for n, t in found.items() if n.startswith(MODEL)}
    optimizer = {n: t for n, t in found.items() if n.startswith(OPTIMIZER)}
    by_kind = {(kind, name): t for n, t in optimizer.items() for _, kind, name in [n.split(":", 2)]}
    return DcpTensors(model, by_kind, told["facts"], told["step"])
