"""First link of the chain: the captured graph computes what the user's module computes.

Both run on the same batch under the same global seed, by the comparison of a capture
(`frontend.CheckRun`). Loss, outputs and buffers are equal bit for bit, gradients to rounding (1e-6
of each tensor's largest in float32), on two batches with two seeds. This file knows nothing of
bundles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from torch import Tensor

from bigbrain_fx.frontend import (
    Captured,
    CheckRun,
    ModelFile,
    Plain,
    Step,
    distance,
    modes_kept,
    route,
    without_fast_path,
)

SEEDS = (0, 1)
SHOWN = 5
_ROUNDED = 8  # units of the largest entry of all gradients: what rounding leaves of a zero


def differences(
    file: ModelFile, captured: Captured, batches: Sequence[Mapping[str, Tensor]]
) -> list[str]:
    """Return where graph and module differ, one line a batch and seed; none when they agree.

    Raises:
        Exception: whatever the module raises on one of them.
    """
    found = []
    with in_mode(file, captured):
        for number, inputs in enumerate(batches):
            given = {entry.name: inputs[entry.name] for entry in captured.graph.inputs}
            for seed in SEEDS:
                run = CheckRun(
                    step_of(file, captured), captured.graph, captured.tensors, captured.functions
                )
                line = run.first_difference(given, seed, gradients=captured.graph.training)
                found += [f"batch {number}, seed {seed}: {line}"] if line else []
                if not run.ran:  # the module refuses it: there was nothing to compare
                    run_module(file, captured, given)
    return found


def run_module(file: ModelFile, captured: Captured, inputs: Mapping[str, Tensor]) -> None:
    """Run the module once as `differences` does.

    Raises:
        Exception: whatever it raises.
    """
    tensors = [inputs[entry.name] for entry in captured.graph.inputs]
    with in_mode(file, captured):
        plain = Plain(step_of(file, captured), file.model, file.autocast)
        plain.run(tensors, SEEDS[0])


def step_of(file: ModelFile, captured: Captured) -> Step:
    """Return the module as one call, with its loss where it trains."""
    how, trains = (
        route(file.model, file.example_batch, file.loss is not None),
        captured.graph.training,
    )
    step = Step(file.model, file.loss if trains else None, captured.batch, how, training=trains)
    step.casts_itself = captured.graph.autocast != file.autocast
    return step


@contextmanager
def in_mode(file: ModelFile, captured: Captured) -> Iterator[None]:
    """Put a module into the mode of its capture; for inference its own modes come back."""
    if captured.graph.training:
        file.model.train()  # as its user would: it may leave a part in eval mode
        yield
        return
    with modes_kept(file.model), without_fast_path():
        file.model.eval()
        yield


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
    return distance(found, want) / (distance(want, None) or 1.0)
