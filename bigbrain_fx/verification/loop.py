"""The processes of the plain training loop: started, asked for steps, ended.

This file knows plans, and what a loop needs to know of one; it compares nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from bigbrain_fx.core import TensorSpec, quantised_weights
from bigbrain_fx.frontend import (
    Call,
    Fork,
    ModelFile,
    Results,
    Say,
    uncompiled,
    where,
)
from bigbrain_fx.plan import Plan, plain_params, read_plan
from bigbrain_fx.supervisor import left_bytes
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.eager import TrainingLoop, Wanted, load_there
from bigbrain_fx.verification.opaque_loop import OpaqueLoop
from bigbrain_fx.weights import Scratch, source_of_weights, trained_steps


class NoLoopError(Exception):
    """Say why the plain loop has no result to compare with."""


class DataEndedError(NoLoopError):
    """Say that the user's data are shorter than the loop."""


class PlainLoop:
    """A plain training loop in a process of its own; two more wait to be asked.

    The second is in float64, or beside a bundle that runs the user's own step the same loop again;
    the third notes what modules give. All are forked here, before this process runs the model file:
    custom operators can be registered once only. Use it as a context manager.

    Args:
        load: returns what is trained, in those processes.
        is_expected: whether it will be asked; else nothing is made ready for that.
    """

    def __init__(self, load: Load = load_there, *, is_expected: bool = True) -> None:
        self._scratch = Scratch("loop")
        self.folder = Path(self._scratch.name)  # where the steps leave what they did
        if is_expected:
            importlib.import_module("torch._dynamo")  # the first step of an optimizer asks for it
        self._single = Fork(partial(_served, load))
        self._second = Fork(partial(_served, load))
        self._third = Fork(partial(_served, load))
        self._asked = self._done = 0

    def begin(
        self, plan: Plan, bundle: Path, location: str, numbers: Mapping[str, Tensor] | None = None
    ) -> None:
        """Say beside which bundle it runs: its seed, its micro-batches, its draws.

        Args:
            plan: of the bundle.
            bundle: its plan.json says what loop that is.
            location: of the model file.
            numbers: other weights than those that model() makes.
        """
        start = str(self.folder / "start") if numbers is not None else ""
        if numbers is not None:
            own = {param.name for param in plain_params(plan.graph)}
            held = own & {name for stage in plan.stages.stages for name in stage.params}
            laid_tensors.save({name: numbers[name] for name in sorted(held)}, Path(start))
        asked = {"bundle": str(bundle), "location": location, "start": start}
        self._single.ask({**asked, "exact": False})
        self._second.ask({**asked, "exact": True})
        self._third.ask({**asked, "exact": False})
        self.start()

    def start(self) -> None:
        """Let it run the next step; `step` waits for it."""
        folder = self.folder / f"step-{self._asked}"
        folder.mkdir(parents=True)
        self._single.ask({"folder": str(folder)})
        self._asked += 1

    def step(self) -> tuple[Path, dict[str, Any]]:
        """Return where the next step has left what it did, and its losses.

        Raises:
            NoLoopError: the user's code raises there.
            DataEndedError: there is no batch for it.
        """
        if self._asked == self._done:
            self.start()
        self._done += 1
        return self.folder / f"step-{self._done - 1}", _answered(self._single)

    def repeats(self, losses: Sequence[float]) -> bool:
        """Whether the same loop gives these losses once more, in another process."""
        found = []
        for step, _ in enumerate(losses):
            folder = self.folder / f"again-{step}"
            folder.mkdir()
            self._second.ask({"folder": str(folder)})
            found.append(float(_answered(self._second)["losses"][0]))
        return found == list(losses)

    def results(self, step: int) -> list[Results]:
        """Return what each module gave in each micro-batch of a step, of the same loop once more.

        Raises:
            NoLoopError: the user's code raises there.
        """
        for number in range(step + 1):
            folder = self.folder / f"noted-{number}"
            folder.mkdir()
            self._third.ask({"folder": str(folder), "noting": number == step})
            micro_batches = len(_answered(self._third)["losses"]) - 1
        found = [Results() for _ in range(micro_batches)]
        for name, tensor in laid_tensors.read(folder / "results").items():
            micro, path, call, _ = name.split("/")
            found[int(micro)].of.setdefault((path, int(call)), []).append(tensor)
        return found

    def exact(self, step: int, state: Path) -> Mapping[str, Tensor] | None:
        """Return a step's gradients in float64; None where the model does not run so."""
        self._second.ask({"folder": str(state.parent), "state": str(state), "step": step})
        try:
            _answered(self._second)
        except NoLoopError:
            return None
        return laid_tensors.read(state.parent / "exact")

    def __enter__(self) -> PlainLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; what they left is gone."""
        for process in (self._single, self._second, self._third):
            process.close()
        self._scratch.cleanup()


def _served(load: Load, requests: IO[str], say: Say) -> None:
    """Serve the loop that is asked for first."""
    first = requests.readline()
    if first:
        serve(_wanted(json.loads(first)), load, requests, say)


def _answered(fork: Fork) -> dict[str, Any]:
    found = fork.answer()
    if found is None:
        raise NoLoopError("its process has ended; often that means: out of memory")
    if "ended" in found:
        raise DataEndedError("batches(seed) has ended")
    if "error" in found:
        raise NoLoopError(f"your model file fails in a plain loop: {found['error']}")
    return found


def _wanted(asked: Mapping[str, Any]) -> Wanted:
    """Return the loop that was asked for."""
    found = wanted_of(read_plan(Path(asked["bundle"])), asked["location"], asked["start"])
    return replace(found, exact=asked["exact"] and not found.call)


def wanted_of(plan: Plan, location: str, start: str = "") -> Wanted:
    """Return the loop that a plan's bundle is compared with; `start` has other weights for it."""
    is_opaque, dims = plan.graph.is_opaque_step, plan.source.batch_dims
    return Wanted(
        location,
        plan.seed,
        plan.micro_batches,
        start=start,
        rounded=quantised_weights(plan.graph) if plan.source.quantize else (),
        loss_count=plan.source.loss_count,
        offsets={
            e.key: plan.source.offsets[e.name] * plan.rows * plan.micro_batches
            for e in plan.graph.inputs
            if e.name in plan.source.offsets
        },
        lengths={
            e.key: tuple(_own_dim(i, dims.get(e.name, 0)) for i, _ in plan.source.lengths[e.name])
            for e in plan.graph.inputs
            if e.name in plan.source.lengths
        },
        varying=tuple(e.key for e in plan.graph.inputs if e.varies),
        divided=tuple(e.key for e in plan.graph.inputs if e.name in plan.source.divided),
        call=cast("Call", plan.graph.ops[0].args[0]) if is_opaque else (),
        entries={e.key: dims.get(e.name, 0) if e.batched else None for e in plan.graph.inputs},
        rows=plan.rows * plan.micro_batches,
        replicas=tuple(map(tuple, plan.stages.micros)),
    )


def _own_dim(dim: int, rows: int) -> int:
    """Return a dimension as the user has it, whose rows are in dimension `rows`, not first."""
    return dim - 1 if 0 < dim <= rows else dim


def lacking(plan: Plan, available: int | None = None) -> str:
    """Say why this host cannot hold the loop beside the graph; empty where it can."""
    trained = [p.spec for p in plan.graph.params if p.name == p.canonical and p.spec.requires_grad]
    kept = [p.spec for p in plan.graph.params if p.name == p.canonical]
    copies = 3 + 2 * plan.source.optimizer_state  # gradients, and the optimizer's of loop and graph
    needed = 3 * sum(map(_nbytes, kept)) + copies * sum(map(_nbytes, trained))
    free = left_bytes() if available is None else available
    if needed <= free:
        return ""
    return f"it needs {needed / 2**30:.1f} GiB of memory here, and {free / 2**30:.1f} GiB are free"


def _nbytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(int(dim) for dim in spec.shape) * dtype.itemsize


@contextlib.contextmanager
def plain_loop(
    plan: Plan, folder: Path, location: str, numbers: Callable[[Path, Plan], Mapping[str, Tensor]]
) -> Iterator[PlainLoop | None]:
    """Start the loop that a bundle is compared with; None where there is none."""
    if plan.mode == "eval" or lacking(plan):
        yield None
        return
    weights = folder / "weights"
    is_other = source_of_weights(weights) is not None or trained_steps(weights) is not None
    with PlainLoop() as loop:
        loop.begin(plan, folder, location, numbers(folder, plan) if is_other else None)
        yield loop


Load = Callable[[Wanted], ModelFile]


def serve(wanted: Wanted, load: Load, requests: IO[str], say: Say) -> None:
    """Run steps as asked, one JSON object a line each way, until the requests end."""
    loop: list[TrainingLoop] = []
    for line in requests:
        try:
            kind = OpaqueLoop if wanted.call else TrainingLoop
            loop = loop or [kind(wanted, load)]
            with uncompiled():
                answer = _answer(loop[0], json.loads(line))
        except StopIteration:
            answer = {"ended": True}
        except Exception as error:  # the user's own code
            first = (str(error).splitlines() or [""])[0]
            at = where(error) or Path(wanted.location).name
            answer = {"error": f"{type(error).__name__}: {first} ({at})"}
        say(answer)


def _answer(loop: TrainingLoop, request: Mapping[str, Any]) -> dict[str, object]:
    folder = Path(request["folder"])
    if "state" in request:
        return loop.run_exactly(request["step"], request["state"], folder)
    if request.get("noting"):
        return loop.run_noting(folder)
    return loop.run_step(folder)
