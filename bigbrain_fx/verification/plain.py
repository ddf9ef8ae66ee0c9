"""First link of the chain: the user's training loop in plain PyTorch = the captured graph.

The loop (`eager`) goes ahead in a process of its own and leaves what each step did. The graph then
does the same step from the same tensors: losses and buffers bit for bit, gradients but for
rounding. The optimizer, called per device as in a bundle, gets the loop's own gradients: one that
divides by small numbers then enlarges no rounding. This file knows graphs; the loop does not.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bigbrain_fx.core import ROW_COUNTS, Input, Op, quantised_weights
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import (
    Captured,
    ModelFile,
    copied,
    differences,
    in_float64,
    relative,
    same_numbers,
    unit_of,
    widened,
)
from bigbrain_fx.plan import Plan, in_turn_text, plain_params
from bigbrain_fx.verification import laid_tensors, plain_batches
from bigbrain_fx.verification.loop import DataEndedError, NoLoopError, PlainLoop
from bigbrain_fx.verification.reference import LoopReference
from bigbrain_fx.verification.trace import link
from bigbrain_fx.verification.training import Recipe
from bigbrain_fx.verification.updates import Updates

NAME = "plain PyTorch = captured graph"
STEPS = 3
_MOST = 40  # steps, until a loss scale has fallen far enough for an update

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Own:
    """Parts of the model file that a bundle has copied.

    Attributes:
        training: its optimizer and rates.
        batches: step -> its micro-batches, by the graph's inputs; None: they are not compared.
    """

    training: Recipe
    batches: Callable[[int], Sequence[Mapping[str, Tensor]]] | None = None


def not_run(reason: str) -> dict[str, object]:
    """Return the link where there is nothing to compare with: it neither holds nor fails."""
    return {"name": NAME, "passed": None, "detail": reason}


def plain_link(
    loop: PlainLoop,
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    own: Own | None = None,
    steps: int = STEPS,
) -> dict[str, object]:
    """Compare the loop with the graph, step by step, each from the loop's own tensors.

    Args:
        loop: the user's, in a process of its own.
        file: the model file.
        captured: its graph.
        plan: of the bundle.
        own: what the bundle itself reads and updates with; else the model file's.
        steps: how many.
    """
    return looped_link(loop, file, captured, plan, own, steps)[0]


def looped_link(
    loop: PlainLoop,
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    own: Own | None,
    steps: int,
    enough_s: float = math.inf,
) -> tuple[dict[str, object], int]:
    """Compare as `plain_link` does; return how many steps that were, too.

    Fewer than asked for where the data end, or where `enough_s` are over after a step.
    """
    found = _Comparison(loop, file, captured, plan, own or Own(file))
    reason = found.compare(steps, enough_s)
    if reason and not found.lines:
        return not_run(reason), found.steps
    made = link(NAME, found.lines, found.said)
    return ({**made, "apart": found.apart} if found.apart else made), found.steps


@dataclass
class _Comparison:
    """Comparisons so far."""

    loop: PlainLoop
    file: ModelFile
    captured: Captured
    plan: Plan
    own: Own
    lines: list[str] = field(default_factory=list)
    worst: float = 0.0
    gradients: int = 0
    steps: int = 0
    updated: int = 0  # of them: a loss scale that is too large leaves some out
    apart: str | None = None  # path of the module that first gave another result, once looked for

    def __post_init__(self) -> None:
        param, stages = self.plan.graph.param, self.plan.stages
        trained = {p.canonical for p in self.plan.graph.params if p.spec.requires_grad}
        held = {
            device: trained & {param[n].canonical for s in stages.of(device) for n in s.params}
            for device in stages.devices
        }
        self.updates = Updates(self.file, held, self.own.training)
        self.constants: dict[str, Tensor] = {}
        self.functions = self.captured.functions
        self.rounded = frozenset(quantised_weights(self.plan.graph))

    def compare(self, steps: int, enough_s: float = math.inf) -> str:
        """Compare the steps that there are data for; return why the loop could not be run."""
        end_s = time.monotonic() + enough_s
        try:
            while self.steps < steps or (not self.updated and self.steps < _MOST):
                self.compare_step(self.steps)
                self.steps += 1
                if time.monotonic() > end_s:
                    break
        except DataEndedError as reason:
            if not self.steps:
                return str(reason)
        except NoLoopError as reason:
            return str(reason)
        except OSError as error:
            return f"its tensors cannot be kept in {self.loop.folder}: {error.strerror or error}"
        self.lines += self.updates.differences()
        return "" if self.updated else f"the loss scale left out all of {self.steps} updates"

    def compare_step(self, step: int) -> None:
        """Wait for the loop's next step; let the graph do it, and compare."""
        folder, made = self.loop.step()
        state, inputs = laid_tensors.read(folder / "state"), laid_tensors.read(folder / "inputs")
        want, after = laid_tensors.read(folder / "gradients"), laid_tensors.read(folder / "after")
        reference = self._reference(state)
        batches = [self._inputs(inputs, m) for m in range(len(made["losses"]) - 1)]
        if made["weights"] is not None:
            pairs = zip(batches, made["weights"], strict=True)
            batches = [{**batch, ROW_COUNTS: torch.tensor([w]).double()} for batch, w in pairs]
        self._compare_batches(step, batches)
        scale = 1.0 if made["scale"] is None else float(made["scale"])
        loss, have = reference.gradients(batches, self.plan.seed, step, scale)
        theirs, ours = made["losses"][0], float(loss)
        if theirs != ours and not (math.isnan(theirs) and math.isnan(ours)):
            self.lines.append(f"loss of step {step}: {theirs:.9g} and {ours:.9g}")
        self._compare_buffers(step, state, after, reference)
        if self.lines and self.apart is None:
            self.apart = self._module_apart(step, state, batches)
        given: dict[str, Tensor] | None = None  # the loop leaves out an update
        fine, same = (all(bool(g.isfinite().all()) for g in all_.values()) for all_ in (want, have))
        if made["scale"] is None or (fine and same):
            exact = partial(self._exact, step, folder / "state", scale)
            widely = partial(self._widely, step, state, batches, scale)
            self._compare_gradients(step, want, have, exact, widely)
            back = float(torch.tensor(scale).double().reciprocal().float())
            given = {n: g * back for n, g in _fed(reference, want, have).items()}
            self.updated += 1
        elif fine or same:
            self.lines.append(f"step {step}: loop or graph alone has gradients that are not finite")
        self.updates.take(step, state, given, after, folder)
        self.functions = reference.functions  # what opaque modules have left is the next step's
        for name in ("inputs", "gradients", "after", "exact", *(["state"] if step else [])):
            (folder / name).unlink(missing_ok=True)

    def _module_apart(
        self, step: int, state: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]]
    ) -> str:
        """Return the path of the module that first gives another result; empty: none is known."""
        reference, values = self._reference(state), list[dict[str, object]]()
        wanted = {name for call in self.plan.graph.arguments for name in call.results}

        def note(op: Op, value: object) -> None:
            if op.name in wanted:
                values[-1][op.name] = copied(value)

        reference.watch = note
        with contextlib.suppress(NoLoopError):
            for micro, results in enumerate(self.loop.results(step)):
                values.append({})
                reference.of_micro_batch(
                    batches[micro], (self.plan.seed, step, micro), lambda loss: loss, 1.0
                )
                path = results.first_apart(self.plan.graph, values.pop())
                if path:
                    return path
        return ""

    def _exact(self, step: int, state: Path, scale: float) -> Gradients | None:
        found = self.loop.exact(step, state)
        return None if found is None else {name: g * scale for name, g in found.items()}

    def _widely(
        self,
        step: int,
        state: Mapping[str, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        scale: float,
    ) -> Gradients | None:
        """Return the graph's gradients of a step in float64; None where it does not run so."""
        inputs: list[Mapping[str, Tensor]] = [
            {name: _wide(tensor) for name, tensor in batch.items()} for batch in batches
        ]
        try:
            with in_float64():
                reference = self._reference(state, wide=True)
                return reference.gradients(inputs, self.plan.seed, step, scale)[1]
        except (RuntimeError, TypeError, ValueError):  # an op that knows its own types alone
            return None

    def _reference(self, state: Mapping[str, Tensor], *, wide: bool = False) -> LoopReference:
        """Return the graph with the loop's tensors; a parameter has one leaf, as there."""
        tensors = dict(self.captured.tensors) | self.constants
        for p in plain_params(self.plan.graph):
            own = state.get(p.name, state.get(p.canonical))
            tensors |= {} if own is None else {p.name: own}
        graph, stages = self.plan.graph, self.plan.stages
        if wide:
            graph = replace(widened(graph), autocast=None)
            tensors = {name: _wide(tensor) for name, tensor in tensors.items()}
        return LoopReference(graph, stages, tensors, self.functions)

    def _inputs(self, inputs: Mapping[str, Tensor], micro: int) -> Mapping[str, Tensor]:
        entries = self.plan.graph.inputs
        found = {e.name: _input(inputs, micro, e) for e in entries}
        for entry in entries:
            _require_type(entry, found[entry.name])
        dims = self.plan.source.batch_dims
        return {n: t.movedim(dims[n], 0) if n in dims else t for n, t in found.items()}

    def _compare_batches(self, step: int, theirs: Sequence[Mapping[str, Tensor]]) -> None:
        """Compare what batches() of the model file gives, and what the bundle reads."""
        if self.own.batches is None or self.lines:
            return
        ours = self.own.batches(step)
        for m, (want, have) in enumerate(zip(theirs, ours, strict=False)):
            both = want.keys() & have.keys()  # an entry that nothing reads is in no bundle
            wrong = [
                name for name in want if name in both and not same_numbers(want[name], have[name])
            ]
            if wrong:
                self.lines.append(f"step {step}: the bundle reads another {wrong[0]}, part {m}")
                return

    def _compare_gradients(
        self,
        step: int,
        want: Gradients,
        have: Gradients,
        exact: Callable[[], Gradients | None],
        widely: Callable[[], Gradients | None],
    ) -> None:
        self.gradients = max(self.gradients, len(want))
        unit = unit_of(self.plan.graph, self.captured.tensors)
        theirs = {name: want.get(name) for name in dict.fromkeys((*want, *have))}
        shares = (relative(gradient, have.get(name)) for name, gradient in theirs.items())
        self.worst = max(self.worst, *shares, 0.0)
        lines = differences(theirs, have, unit, exact, widely)
        self.lines += [f"step {step}: {line}" for line in lines]

    def _compare_buffers(
        self,
        step: int,
        state: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        reference: LoopReference,
    ) -> None:
        """Compare what is not trained, and what the graph does not know at all."""
        for name, value in after.items():
            if name in reference.parameters or name in self.rounded:
                continue
            known = reference.buffers.get(name, state.get(name, value))  # or forward made it
            if not same_numbers(known, value):
                self.lines.append(f"step {step}: {name} has other numbers after it")
        self.constants |= {n: t for n, t in reference.buffers.items() if n not in after}

    @property
    def said(self) -> str:
        """Say what was compared, where nothing differs."""
        why = in_turn_text(self.plan.graph, self.plan.stages)
        why = f" ({why})" if why else ""
        gradients = f"to {self.worst:.0e} of a tensor's largest{why}" if self.worst else "bitwise"
        left_out = self.steps - self.updated
        scaled = f" ({left_out} left out by the loss scale)" if left_out else ""
        done = f"{self.steps} steps of train(), loss.backward(), optimizer.step(){scaled}"
        if self.rounded:
            done = f"frozen weights rounded to int8 by verify's own formula, then {done}"
        return (
            f"{done}: losses and "
            f"buffers bitwise, {self.gradients} gradients {gradients}, weights {self.updates.said} "
            "from the same gradients"
        )


def _input(inputs: Mapping[str, Tensor], micro: int, entry: Input) -> Tensor:
    """Return an input of a micro-batch; a number has the type that the trace gave it."""
    number = inputs.get(plain_batches.number_name(micro, entry.key))
    if number is not None:
        return number.to(getattr(torch, entry.spec.dtype))
    return inputs[plain_batches.input_name(micro, entry.key)]


def _require_type(entry: Input, value: Tensor) -> None:
    """Refuse a batch that a bundle would refuse, too: a trace holds for one type.

    Raises:
        InputError: it is of another type than the example.
    """
    found = str(value.dtype).removeprefix("torch.")
    if found != entry.spec.dtype:
        raise InputError(
            f"batches() gives {entry.name} as {found}, but the model was split for "
            f"{entry.spec.dtype}",
            code="BX3811",
            at="batches",
            help=f"give it the type of example_batch(): .to(torch.{entry.spec.dtype})",
        )


def _fed(reference: LoopReference, want: Gradients, have: Gradients) -> dict[str, Tensor]:
    """Return the loop's gradients where the graph has one: none is not zero to an optimizer."""
    return {
        name: want[name] if name in want else torch.zeros_like(have[name])
        for name in reference.parameters
        if name in have
    }


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
