"""A bundle trained in a process that has not run the model file, as every process of a run is.

    a fork, before the model file is run here ─▶ asked, it trains the bundle ─▶ losses, tensors
    a new Python, beside a module in memory   ─▶

model() may set something of its process: a filter of warnings, a context, a number of a library. It
is then set in the process that compares, and in no process of a bundle. The module compares
nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Answering, Ends, Fork, Say, answer, uncompiled
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.processes import Forking
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.device_processes import can_start, train_by_processes
from bigbrain_fx.verification.imported_bundle import import_bundle, run_bundle
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.weights import Scratch


@dataclass(frozen=True)
class Way:
    """How a bundle is trained: all devices in one process, or in a process each.

    Attributes:
        by_processes: a process a device, where they can be started here.
        other_hashes: new Pythons with another hash seed, and no forks.
    """

    by_processes: bool = False
    other_hashes: bool = False


class Alone:
    """A process begun here and now, which waits to be asked; a context manager.

    Args:
        forking: forks it, without anything of this process; else it is a fork of this one.
    """

    def __init__(self, forking: Forking | None = None) -> None:
        self._scratch = Scratch("alone")
        self.scratch = Path(self._scratch.name)  # where it leaves what training leaves
        self._fork = Fork(_serve) if forking is None else _New(forking)
        self.has_begun = False

    def begin(self, folder: Path, steps: int, way: Way | None = None) -> None:
        """Let it train so many steps of a bundle; `train` waits for it."""
        self.has_begun = True
        about = {"bundle": str(folder), "scratch": str(self.scratch)}
        self._fork.ask({**about, "steps": steps, "way": asdict(way or Way())})

    def train(self, folder: Path, plan: Plan, steps: int) -> Trace:
        """Return what training leaves; where it fails there, run it here, for its explanation.

        Args:
            folder: of the bundle.
            plan: of the bundle.
            steps: how many.

        Raises:
            InputError: it fails there only.
        """
        if not self.has_begun:
            self.begin(folder, steps)
        found = self._fork.answer() or {"error": "its process has ended"}
        if "error" in found:
            run_bundle(import_bundle(folder), plan, steps, plan.seed)
            raise InputError(
                "the bundle trains where model() was called, and fails in a process of its own: "
                f"{found['error']}",
                code="BX3806",
                at=str(folder),
                help="set at the top of the model file, outside model() and example_batch(), what "
                "batches, optimizer and the like go by",
            )
        return Trace(
            [torch.tensor(loss, dtype=torch.float64) for loss in found["losses"]],
            laid_tensors.read(self.scratch / "gradients"),
            laid_tensors.read(self.scratch / "tensors"),
            set(found["unlike"]),
        )

    def close(self) -> None:
        """End the fork; what it left is gone."""
        self._fork.close()
        self._scratch.cleanup()

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _New(Answering):
    """A process that has nothing of this one: neither its modules nor what they have set."""

    def __init__(self, forking: Forking) -> None:
        self._forking = forking
        super().__init__(self._begin)

    def _begin(self, its: Ends, _ours: Ends) -> None:
        paths = os.environ.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[2])
        order = {
            "words": ["-P", "-m", __name__],
            "folder": os.getcwd(),
            "environment": {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            "session": True,
        }
        with open(os.devnull, "wb") as nothing:
            self._process = self._forking.fork(order, [*its, nothing.fileno()])

    def close(self) -> None:
        """End it, with its forks."""
        super().close()
        self._process.leave()


def _serve(requests: IO[str], say: Say) -> None:
    """Train, once asked; leave tensors in the scratch folder."""
    asked = requests.readline()
    if asked:
        say(_trained(**json.loads(asked)))


def _trained(bundle: str, scratch: str, steps: int, way: Mapping[str, bool]) -> dict[str, object]:
    try:
        found = _trace(Path(bundle), Path(scratch), steps, Way(**way))
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    laid_tensors.save(found.gradients, Path(scratch, "gradients"))
    laid_tensors.save(found.tensors, Path(scratch, "tensors"))
    return {"losses": [float(loss) for loss in found.losses], "unlike": sorted(found.unlike)}


def _trace(folder: Path, scratch: Path, steps: int, way: Way) -> Trace:
    plan = read_plan(folder)
    by_processes = way.by_processes and can_start(plan, other_hashes=way.other_hashes)
    with contextlib.nullcontext() if plan.stages.compiled else uncompiled():
        found = None
        if by_processes:
            how = {"other_hashes": way.other_hashes}
            found = train_by_processes(folder, plan, steps, scratch, **how)
        return found or run_bundle(import_bundle(folder), plan, steps, plan.seed)


if __name__ == "__main__":
    answer(_serve, os.dup(0), os.dup(1))
