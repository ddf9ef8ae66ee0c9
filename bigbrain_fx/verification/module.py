"""First link of the chain: the captured graph computes what the user's module computes.

Both run on the same batch under the same global seed: loss and outputs bit for bit, gradients but
for rounding (1e-6 of each tensor's largest in float32), buffers bit for bit; two batches, two
seeds. This room knows capture; it knows nothing of stages or bundles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend import (
    Captured,
    Gradients,
    ModelFile,
    Step,
    ambient,
    differences as gradient_differences,
    exact_gradients,
    route,
    run_graph,
    unit_of,
)

SEEDS = (0, 1)
SHOWN = 5
_ROUNDED = 8  # units of the largest entry of all gradients: what rounding leaves of a zero


@dataclass(frozen=True)
class ModuleOutcome:
    """What one forward and backward leaves: values, gradients and buffers by name."""

    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def differences(
    file: ModelFile, captured: Captured, batches: Sequence[Mapping[str, Tensor]]
) -> list[str]:
    """Return where graph and module differ, one line each; none when they agree."""
    found, unit = [], unit_of(captured.graph, captured.tensors)
    file.model.train()  # as its user would: it may leave a part in eval mode
    for number, inputs in enumerate(batches):
        for seed in SEEDS:
            expected = _with_state_kept(captured, partial(_eager, file, captured, inputs), seed)
            actual = _with_state_kept(captured, partial(_captured, captured, inputs), seed)
            exact = partial(_exact, file, captured, inputs, list(expected.gradients), seed)
            lines = compare(expected, actual, unit, exact)
            found += [f"batch {number}, seed {seed}: {line}" for line in lines]
    return found


def in_train(file: ModelFile, captured: Captured, inputs: Mapping[str, Tensor]) -> None:
    """Run the module once as `differences` does, for whether it can be."""
    file.model.train()
    _with_state_kept(captured, partial(_eager, file, captured, inputs), 0)


def another_size(
    run: Callable[[Mapping[str, Tensor]], object], captured: Captured, rows: int
) -> list[Mapping[str, Tensor]]:
    """Return a batch of other rows, where the module runs on one: pairs of rows want twice as many.

    Args:
        run: the module, on a batch.
        captured: its capture, of any number of rows.
        rows: the number to leave.
    """
    for count in (rows + 1, 2 * rows):
        inputs = captured.inputs(count)
        with suppress(Exception):  # the user's own code, in a way it may not know
            run(inputs)
            return [inputs]
    return []


def compare(
    expected: ModuleOutcome,
    actual: ModuleOutcome,
    unit: float,
    exact: Callable[[], Gradients | None],
) -> list[str]:
    """List what differs between two outcomes; for `unit` and `exact` see `capture.rounding`."""
    lines = [
        f"{name} differs"
        for name, want in expected.values.items()
        if not equal(actual.values[name], want)
    ]
    lines += gradient_differences(expected.gradients, actual.gradients, unit, exact)
    lines += [
        f"buffer {name} differs"
        for name, want in expected.buffers.items()
        if not equal(actual.buffers[name], want)
    ]
    return lines


def equal(found: Tensor, want: Tensor) -> bool:
    """Whether two tensors have the same numbers; NaN equals NaN."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return False
    return torch.equal(found, want) or bool(
        torch.isclose(found, want, rtol=0, atol=0, equal_nan=True).all()
    )


def link(name: str, found: list[str], detail: str) -> dict[str, object]:
    """Return one link of the chain: it holds when nothing was found; else the first few findings.

    A broken bundle differs everywhere: the first few lines say enough.
    """
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    shown = "; ".join([*found[:SHOWN], *more])
    return {"name": name, "passed": not found, "detail": shown if found else detail}


def left_of_zero(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], unit: float
) -> frozenset[str]:
    """Return whose gradient is in both what rounding leaves of a zero: it has no digit to compare.

    A bias before a BatchNorm has such a one, and whatever moves both sides of a distance.

    Args:
        expected: gradients of all that is trained.
        found: those to compare with them.
        unit: of rounding, of the coarsest type in the model.
    """
    sizes = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in expected.items()}
    noise = _ROUNDED * unit * max(sizes.values(), default=0.0)
    return frozenset(
        name
        for name, size in sizes.items()
        if 0 < size <= noise and name in found and float(found[name].abs().max()) <= noise
    )


def relative_error(found: Tensor | None, want: Tensor) -> float:
    """Return the largest difference as a share of the largest entry; a missing gradient is zero."""
    other = torch.zeros_like(want) if found is None else found
    if want.numel() == 0 or equal(other, want):
        return 0.0
    scale = want.abs().max().item() or 1.0
    error = (other - want).abs().max().item() / scale
    return error if error == error else float("inf")


def _step(file: ModelFile, captured: Captured) -> Step:
    how = route(file.model, file.example_batch, file.loss is not None)
    return Step(file.model, file.loss, captured.batch, how)


def _exact(
    file: ModelFile,
    captured: Captured,
    inputs: Mapping[str, Tensor],
    names: Sequence[str],
    seed: int,
) -> Gradients | None:
    tensors = [inputs[entry.name] for entry in captured.graph.inputs]
    return exact_gradients(_step(file, captured), file.model, tensors, names, seed)


def _eager(file: ModelFile, captured: Captured, inputs: Mapping[str, Tensor]) -> ModuleOutcome:
    step = _step(file, captured)
    tensors = [inputs[entry.name].clone() for entry in captured.graph.inputs]
    held = [(part, dict(part._buffers)) for part in file.model.modules()]
    try:
        with ambient(captured.graph.autocast, tensors):
            values = step(*tensors)
        buffers = dict(file.model.named_buffers(remove_duplicate=False))
    finally:  # forward may have given a buffer a new tensor instead of writing into it
        for part, kept in held:
            part._buffers.update(kept)
    return _outcome(captured, dict(zip(_names(captured.graph), values, strict=True)), buffers)


def _captured(captured: Captured, inputs: Mapping[str, Tensor]) -> ModuleOutcome:
    cloned = {name: tensor.clone() for name, tensor in inputs.items()}
    found = run_graph(captured.graph, captured.tensors, cloned, functions=captured.functions)
    values = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return _outcome(captured, values, captured.tensors)


def _outcome(
    captured: Captured, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> ModuleOutcome:
    graph = captured.graph
    wanted = {
        p.name: captured.tensors[p.name]
        for p in graph.params
        if p.spec.requires_grad and p.name == p.canonical
    }
    gradients = _gradients(values[graph.loss], wanted) if graph.loss is not None else {}
    buffers = {
        p.name: tensors.get(p.name, captured.tensors[p.name]).clone()
        for p in graph.params
        if p.kind != "parameter"
    }
    return ModuleOutcome(
        {name: value.detach() for name, value in values.items()}, gradients, buffers
    )


def _gradients(loss: Tensor, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run backward as a user does: a reentrant checkpoint refuses `torch.autograd.grad`."""
    for tensor in wanted.values():
        tensor.grad = None
    loss.backward()
    found = {name: tensor.grad for name, tensor in wanted.items() if tensor.grad is not None}
    for tensor in wanted.values():
        tensor.grad = None
    return found


def _names(graph: Graph) -> list[str]:
    return [*([graph.loss] if graph.loss else []), *graph.outputs]


def _with_state_kept(
    captured: Captured, run: Callable[[], ModuleOutcome], seed: int
) -> ModuleOutcome:
    written = set(_written(captured.graph))  # frozen parameters among them: a momentum encoder's
    kept = {
        n: t.detach().clone()
        for n, t in captured.tensors.items()
        if n in written or not isinstance(t, nn.Parameter)
    }
    torch.manual_seed(seed)
    try:
        return run()
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                captured.tensors[name].copy_(value)


def _written(graph: Graph) -> Iterator[str]:
    """Yield what ops write into, those of regions, too."""
    for op in graph.ops:
        yield from op.mutates
        yield from _written(op.body) if op.body is not None else ()
