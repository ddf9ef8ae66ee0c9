"""A bundle trained in a process that has not run the model file, as every process of a run is.

    a fork, before the model file is run here ─▶ asked, it trains the bundle ─▶ losses, tensors

model() may set something of its process: a filter of warnings, a context, a number of a library. It
is then set in the process that compares, and in no process of a bundle. The module compares
nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Fork, Say, uncompiled
from bigbrain_fx.plan import Plan, read_plan
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
    """A fork made here and now, which waits to be asked; a context manager."""

    def __init__(self) -> None:
        self._scratch = Scratch("alone")
        self.scratch = Path(self._scratch.name)  # where it leaves what training leaves
        self._fork = Fork(self._serve)
        self.has_begun = False

    def begin(self, folder: Path, steps: int, way: Way | None = None) -> None:
        """Let it train so many steps of a bundle; `train` waits for it."""
        self.has_begun = True
        self._fork.ask({"bundle": str(folder), "steps": steps, "way": asdict(way or Way())})

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

    def _serve(self, requests: IO[str], say: Say) -> None:
        """Train, once asked; leave tensors in the scratch folder."""
        asked = requests.readline()
        if asked:
            say(self._trained(**json.loads(asked)))

    def _trained(self, bundle: str, steps: int, way: Mapping[str, bool]) -> dict[str, object]:
        try:
            found = self._trace(Path(bundle), steps, Way(**way))
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        laid_tensors.save(found.gradients, self.scratch / "gradients")
        laid_tensors.save(found.tensors, self.scratch / "tensors")
        return {"losses": [float(loss) for loss in found.losses], "unlike": sorted(found.unlike)}

    def _trace(self, folder: Path, steps: int, way: Way) -> Trace:
        plan = read_plan(folder)
        by_processes = way.by_processes and can_start(plan, other_hashes=way.other_hashes)
        with contextlib.nullcontext() if plan.stages.compiled else uncompiled():
            found = None
            if by_processes:
                how = {"other_hashes": way.other_hashes}
                found = train_by_processes(folder, plan, steps, self.scratch, **how)
            return found or run_bundle(import_bundle(folder), plan, steps, plan.seed)
