"""A rehearsal: the user's untouched loop beside the bundle that was just written, for a few steps.

    before the file is run ─▶ forks wait ─▶ the file is run, traced, planned, written
                                └─▶ the loop, and the bundle: processes that have not run it
    loop = graph = one process = bundle: losses, gradients, buffers and weights of each step

What model() sets on the side, what a function of the file leaves for another, what a bundle's copy
of the file has otherwise, what a trace keeps that changes: all show as other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import BigBrainError, about_code, from_fields
from bigbrain_fx.frontend import CaptureService, apart
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.verification.alone import Alone
from bigbrain_fx.verification.chain import rehearsed_links
from bigbrain_fx.verification.failures import error_of
from bigbrain_fx.verification.imported_bundle import weights_of
from bigbrain_fx.verification.loop import PlainLoop, lacking, save_start
from bigbrain_fx.verification.opaque import opaque_chain
from bigbrain_fx.verification.plain import STEPS
from bigbrain_fx.weights import Scratch


class Rehearsal:
    """Forks of a process that has not run the model file yet; they wait for the bundle."""

    def __init__(self) -> None:
        self.scratch = Scratch("rehearsal")
        self.loop = PlainLoop(_folder(self.scratch, "loop"))
        self.alone = Alone(_folder(self.scratch, "bundle"))

    def compare(self, service: CaptureService, request: Mapping[str, Any]) -> dict[str, object]:
        """Train a few steps both ways; return the links, or why there are none.

        Args:
            service: has the captured model.
            request: "bundle", a folder; "limit_s", for all of it.

        Raises:
            BigBrainError: the bundle cannot be trained on the user's data.
        """
        folder = Path(request["bundle"])
        plan = read_plan(folder)
        try:
            return self._compare(service, plan, folder, float(request["limit_s"]))
        finally:
            self.close()

    def _compare(
        self, service: CaptureService, plan: Plan, folder: Path, limit_s: float
    ) -> dict[str, object]:
        why = lacking(plan)
        if why:
            return {"checks": [], "why": why}
        found = apart(partial(self._links, service, plan, folder), limit_s)
        if found is None:
            return {"checks": [], "why": f"it takes longer than {limit_s:g} s here"}
        answer: dict[str, Any] = json.loads(found["answer"])
        if "error" in answer:
            with about_code():
                raise from_fields(answer["error"])
        return answer

    def close(self) -> None:
        """End the forks."""
        self.loop.close()
        self.alone.close()
        self.scratch.cleanup()

    def _links(self, service: CaptureService, plan: Plan, folder: Path) -> dict[str, str]:
        """Compare, in a fork of the process that has the captured model."""
        try:
            answer: dict[str, object] = {"checks": self._compared(service, plan, folder)}
        except BigBrainError as error:
            answer = {"error": error.fields}
        except Exception as error:
            known = error_of(error, folder, service.file.path)
            answer = {"checks": [], "why": f"{type(error).__name__}: {error}"}
            answer = {"error": known.fields} if known else answer
        return {"answer": json.dumps(answer)}

    def _compared(
        self, service: CaptureService, plan: Plan, folder: Path
    ) -> list[dict[str, object]]:
        self._begin(service, plan, folder)
        if plan.graph.is_opaque_step:
            return opaque_chain(plan, folder, STEPS, self.loop, self.alone)
        file, captured = service.file, service.captured
        return rehearsed_links(file, captured, plan, folder, self.loop, self.alone)

    def _begin(self, service: CaptureService, plan: Plan, folder: Path) -> None:
        """Let the loop begin, with the weights that the bundle has."""
        start = None
        if not plan.graph.is_opaque_step:
            start = self.loop.folder / "start"
            save_start(plan, weights_of(folder, plan), start)
        self.loop.begin(folder, service.file.location, start)


def _folder(scratch: Scratch, name: str) -> Path:
    found = Path(scratch.name) / name
    found.mkdir()
    return found
