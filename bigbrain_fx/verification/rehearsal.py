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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbrain_fx.errors import BigBrainError, InputError, about_code, from_fields
from bigbrain_fx.frontend import CaptureService, apart
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.verification.alone import Alone, Way
from bigbrain_fx.verification.chain import rehearsed_links
from bigbrain_fx.verification.failures import error_of
from bigbrain_fx.verification.imported_bundle import weights_of
from bigbrain_fx.verification.loop import PlainLoop, lacking, save_start
from bigbrain_fx.verification.opaque import opaque_chain
from bigbrain_fx.verification.plain import STEPS
from bigbrain_fx.verification.process_order import line_of_draw, line_of_set
from bigbrain_fx.weights import Scratch


class Rehearsal:
    """Forks of a process that has not run the model file yet; they wait for a bundle.

    Two sets of them: with lines of the model file, and with all of it.
    """

    def __init__(self) -> None:
        self.waiting = [_Waiting() for _ in range(2)]

    def compare(self, service: CaptureService, request: Mapping[str, Any]) -> dict[str, object]:
        """Train a few steps both ways; return the links, or why there are none.

        Args:
            service: has the captured model.
            request: "bundle", a folder; "limit_s", for all of it.

        Raises:
            BigBrainError: the bundle cannot be trained on the user's data.
        """
        folder = Path(request["bundle"])
        plan, forks = read_plan(folder), self.waiting.pop()
        try:
            why = lacking(plan)
            if why:
                return {"checks": [], "why": why}
            return _Comparison(service, plan, folder, forks).run(float(request["limit_s"]))
        finally:
            forks.close()


class _Waiting:
    """A loop and a bundle's process, before either has run anything."""

    def __init__(self) -> None:
        self.scratch = Scratch("rehearsal")
        self.loop = PlainLoop(_folder(self.scratch, "loop"))
        self.alone = Alone(_folder(self.scratch, "bundle"))

    def close(self) -> None:
        """End the forks."""
        self.loop.close()
        self.alone.close()
        self.scratch.cleanup()


@dataclass(frozen=True)
class _Comparison:
    """One bundle and what it is compared with."""

    service: CaptureService
    plan: Plan
    folder: Path
    forks: _Waiting

    def run(self, limit_s: float) -> dict[str, object]:
        """Compare, in a fork of the process that has the captured model."""
        found = apart(self._links, limit_s)
        if found is None:
            return {"checks": [], "why": f"it takes longer than {limit_s:g} s here"}
        answer: dict[str, Any] = json.loads(found["answer"])
        if "error" in answer:
            with about_code():
                raise from_fields(answer["error"])
        return answer

    def _links(self) -> dict[str, str]:
        file = self.service.file
        of_set = None if file.is_data else line_of_set(file.path)
        try:
            answer: dict[str, Any] = {"checks": self._compared(of_set), "set": of_set}
        except BigBrainError as error:
            answer = {"error": error.fields}
        except Exception as error:
            known = error_of(error, self.folder, file.path)
            answer = {"checks": [], "why": f"{type(error).__name__}: {error}"}
            answer = {"error": known.fields} if known else answer
        if "error" in answer or any(c["passed"] is False for c in answer["checks"]):
            answer = self._unseeded() or answer
        return {"answer": json.dumps(answer)}

    def _unseeded(self) -> dict[str, Any] | None:
        """Say of a difference that it may be of dice which no line has seeded."""
        file = self.service.file
        at = None if file.is_data else line_of_draw(file.path)
        if at is None:
            return None
        error = InputError(
            f"the top of {file.path.name} draws with Python's or NumPy's random numbers, without a "
            "seed, and processes of a bundle, which draw others, do not train as your own loop",
            code="BX2046",
            at=at,
            help="seed them at the top, before they draw: random.seed(0), numpy.random.seed(0); or "
            "draw in batches(seed), by its seed",
        )
        return {"error": error.fields}

    def _compared(self, of_set: str | None) -> list[dict[str, object]]:
        plan, folder, forks = self.plan, self.folder, self.forks
        self._begin()
        if plan.graph.is_opaque_step:
            return opaque_chain(plan, folder, STEPS, forks.loop, forks.alone)
        file, captured = self.service.file, self.service.captured
        how = Way(by_processes=True, other_hashes=of_set is not None)
        return rehearsed_links(file, captured, plan, folder, forks.loop, forks.alone, how)

    def _begin(self) -> None:
        """Let the loop begin, with the weights that the bundle has."""
        start = None
        if not self.plan.graph.is_opaque_step:
            start = self.forks.loop.folder / "start"
            save_start(self.plan, weights_of(self.folder, self.plan), start)
        self.forks.loop.begin(self.folder, self.service.file.location, start)


def _folder(scratch: Scratch, name: str) -> Path:
    found = Path(scratch.name) / name
    found.mkdir()
    return found
