"""A bundle trained in a process that has not run the model file, as every process of a run is.

    a fork, before the model file is run here ─▶ asked, it trains the bundle ─▶ losses, tensors

What model() sets of a process (a filter of warnings, a context, a number of a library) is set in
the one that compares, and in no process of a bundle. It compares nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.imported_bundle import import_bundle, run_bundle
from bigbrain_fx.verification.loop import be_quiet
from bigbrain_fx.verification.reference import Trace
from bigbrain_fx.weights import Scratch


class Alone:
    """A fork made here and now, which waits to be asked."""

    def __init__(self, folder: Path, plan: Plan, steps: int, scratch: Path) -> None:
        self.folder, self.plan, self.steps, self.scratch = folder, plan, steps, scratch
        waits, self._asks = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._asks)
            self._be_the_fork(waits)
        os.close(waits)

    def train(self, load: Callable[[], ModuleType]) -> Trace:
        """Return what training leaves; where it fails there, run it here, for whoever explains it.

        Args:
            load: imports the bundle in this process.

        Raises:
            InputError: it fails there only.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._asks, b"1")
        self._end()
        said = self.scratch / "said.json"
        found = (
            json.loads(said.read_text()) if said.exists() else {"error": "its process has ended"}
        )
        if "error" in found:
            run_bundle(load(), self.plan, self.steps, self.plan.seed)
            raise InputError(
                "the bundle trains where model() was called, and fails in a process of its own: "
                f"{found['error']}",
                code="BX3806",
                at=str(self.folder),
                help="set at the top of the model file, outside model() and example_batch(), what "
                "batches, optimizer and the like go by",
            )
        return Trace(
            [torch.tensor(loss, dtype=torch.float64) for loss in found["losses"]],
            laid_tensors.read(self.scratch / "gradients"),
            laid_tensors.read(self.scratch / "tensors"),
            set(found["unlike"]),
        )

    def _end(self) -> None:
        os.close(self._asks)
        self._asks = -1
        os.waitpid(self.pid, 0)

    def close(self) -> None:
        """End the fork, if nobody has asked it."""
        if self._asks >= 0:
            os.kill(self.pid, signal.SIGKILL)
            self._end()

    def _be_the_fork(self, waits: int) -> None:
        """Train, once asked, and leave what there is in the scratch folder."""
        try:
            be_quiet()
            if os.read(waits, 1):
                (self.scratch / "said.json").write_text(json.dumps(self._trained()))
        finally:
            os._exit(0)

    def _trained(self) -> dict[str, object]:
        try:
            bundle = import_bundle(self.folder)
            found = run_bundle(bundle, self.plan, self.steps, self.plan.seed)
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        laid_tensors.save(found.gradients, self.scratch / "gradients")
        laid_tensors.save(found.tensors, self.scratch / "tensors")
        return {"losses": [float(loss) for loss in found.losses], "unlike": sorted(found.unlike)}


@contextlib.contextmanager
def alone(folder: Path, plan: Plan, steps: int) -> Iterator[Alone]:
    """Let a fork wait; it ends with the block."""
    with Scratch("alone") as scratch:
        made = Alone(folder, plan, steps, Path(scratch))
        try:
            yield made
        finally:
            made.close()
