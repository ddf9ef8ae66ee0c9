"""The chain of a bundle that runs the user's own step: plain PyTorch = bundle.

There is no graph between them: losses, gradients of the first step, and all tensors at the end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from bigbrain_fx.plan import Plan
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.alone import Alone, train_bundle
from bigbrain_fx.verification.imported_bundle import import_bundle
from bigbrain_fx.verification.loop import NoLoopError, PlainLoop, lacking
from bigbrain_fx.verification.trace import Trace, same_run

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
    try:
        want = _looped(plain, steps)
    except NoLoopError as error:
        return [{"name": NAME, "passed": None, "detail": str(error)}]
    have = trained or train_bundle(alone, folder, plan, steps, partial(import_bundle, folder))
    checks = same_run(NAME, want, have, [*want.tensors])
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
