"""The chain of a bundle that runs the user's own step: plain PyTorch = bundle.

There is no graph between them: losses, gradients of the first step, and all tensors at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bigbrain_fx.plan import Plan
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.alone import Alone
from bigbrain_fx.verification.imported_bundle import import_bundle, run_bundle
from bigbrain_fx.verification.loop import NoLoopError, PlainLoop, lacking
from bigbrain_fx.verification.module import equal, link
from bigbrain_fx.verification.reference import Trace

NAME = "plain PyTorch = bundle"
_OTHER = (
    "your own loop gives other losses in each process: it goes by the clock, by a file, or by "
    "random numbers that nobody seeds"
)


def opaque_chain(
    plan: Plan,
    folder: Path,
    steps: int,
    plain: PlainLoop | None,
    alone: Alone | None,
    trained: Trace | None = None,
) -> list[dict[str, object]]:
    """Compare the user's loop with the bundle, bit for bit; return a check for each quantity.

    Args:
        plan: of the bundle.
        folder: of the bundle.
        steps: how many are trained.
        plain: the loop, in a process that has not run the model file before.
        alone: trains the bundle in another such process.
        trained: what real processes made of the bundle.
    """
    if plain is None:
        return [{"name": NAME, "passed": None, "detail": lacking(plan)}]
    load = partial(import_bundle, folder)
    try:
        want = _looped(plain, steps)
    except NoLoopError as error:
        return [{"name": NAME, "passed": None, "detail": str(error)}]
    have = trained or _trained(plan, folder, steps, alone, load)
    checks = [*_compared(want, have, steps)]
    if not checks[0]["passed"] and not plain.repeats([float(loss) for loss in want.losses]):
        return [{"name": NAME, "passed": None, "detail": _OTHER}]
    return checks


def _looped(plain: PlainLoop, steps: int) -> Trace:
    """Return what the loop leaves."""
    found = Trace()
    for step in range(steps):
        folder, made = plain.step()
        found.losses.append(torch.tensor(made["losses"][0], dtype=torch.float64))
        if not step:
            found.gradients.update(laid_tensors.read(folder / "gradients"))
        if step + 1 == steps:
            found.tensors.update(laid_tensors.read(folder / "after"))
    return found


def _trained(
    plan: Plan, folder: Path, steps: int, alone: Alone | None, load: Callable[[], ModuleType]
) -> Trace:
    return (
        alone.train(folder, plan, steps, load)
        if alone
        else run_bundle(load(), plan, steps, plan.seed)
    )


def _compared(want: Trace, have: Trace, steps: int) -> Iterator[dict[str, object]]:
    losses = [
        f"step {step}: {float(one):.9g} and {float(other):.9g}"
        for step, (one, other) in enumerate(zip(want.losses, have.losses, strict=True))
        if not equal(other, one)
    ]
    yield link(f"{NAME}, losses", losses, f"{steps} steps bitwise")
    gradients = [
        f"gradient of {n}" for n, g in want.gradients.items() if not _has(have.gradients, n, g)
    ]
    yield link(f"{NAME}, gradients", gradients, f"{len(want.gradients)} of step 0 bitwise")
    tensors = [n for n, t in want.tensors.items() if not _has(have.tensors, n, t)]
    tensors += [f"{name} differs between the devices that hold it" for name in sorted(have.unlike)]
    said = f"{len(want.tensors)} parameters and buffers after {steps} steps bitwise"
    yield link(f"{NAME}, weights and buffers", tensors, said)


def _has(found: Mapping[str, Tensor], name: str, want: Tensor) -> bool:
    return name in found and equal(found[name], want)
