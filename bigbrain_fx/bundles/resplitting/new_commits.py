"""A bundle that was just split, and an optimizer's state -> the commit that its run begins with.

an optimizer of this process that has made steps   ─┐
a run of another bundle of the same model          ─┴▶  commit of step t: weights of the bundle
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbrain_fx.bundles.resplitting.moving import write_commit
from bigbrain_fx.bundles.resplitting.named import Named, facts_of_plan, places_of
from bigbrain_fx.bundles.resplitting.newest import newest_state
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.weights import (
    Copy,
    Scratch,
    Stored,
    read_header,
    stored_tensors,
    tensors_apart,
    write_file,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_OF_RUN = ("seed", "loss_scale")  # that go on; batches and micro-batches may be others


def commit_of_caller(
    plan: Plan, bundle: Path, module: nn.Module, optimizer: Optimizer, to: Path, step: int = 0
) -> None:
    """Write the bundle's weights and an optimizer's state as the commit of its first step.

    Args:
        plan: of the bundle, without tensor groups.
        bundle: split from the module.
        module: the caller's.
        optimizer: steps parameters of it.
        to: the folder of commits, to be made.
        step: the first.

    Raises:
        StateError: the optimizer keeps what is no number.
        OSError: it cannot be written.
    """
    from safetensors.torch import save_file

    from bigbrain_fx.runtime import optimizer_facts, optimizer_tensors

    parameters = dict(module.named_parameters())  # an optimizer may have frozen ones, too
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    with Scratch("state") as scratch:
        own = Path(scratch, "optimizer.safetensors")
        save_file(tensors_apart(optimizer_tensors(optimizer, parameters)), own)
        state = optimizer_facts(optimizer, parameters, rates)
        _write(plan, bundle, read_header(own), state, facts_of_plan(plan), step, to)


def commit_of_run(plan: Plan, bundle: Path, before: Path, commits: Path, to: Path) -> None:
    """Write the bundle's weights, and the optimizer's state of another bundle's newest commit.

    Args:
        plan: of the bundle.
        bundle: split from the same model.
        before: the other bundle.
        commits: of its run; the step goes on.
        to: the folder of commits, to be made.

    Raises:
        InputError: the commit is not of the other bundle.
        OSError: it cannot be written.
    """
    with newest_state(read_plan(before), before, commits, to) as (named, _):
        headers = [read_header(path) for path in named.files.values()]
        state = {n: t for h in headers for n, t in h.items() if n.startswith("optimizer:")}
        facts = {**facts_of_plan(plan), **{name: named.facts[name] for name in _OF_RUN}}
        _write(plan, bundle, state, named.optimizer, facts, named.step, to)


def _write(
    plan: Plan,
    bundle: Path,
    state: Mapping[str, Stored],
    optimizer: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    step: int,
    to: Path,
) -> None:
    weights = stored_tensors(bundle / "weights")
    held = {
        f"{'parameter' if p.kind == 'parameter' else 'buffer'}:{p.canonical}": weights[p.name]
        for p in plan.graph.params
        if p.name in weights
    }
    copies = [Copy(name, stored.dtype, stored) for name, stored in {**held, **state}.items()]
    with Scratch("state") as scratch:
        image = Path(scratch, "image.safetensors")
        write_file(image, copies)
        places = places_of(image, step)
        write_commit(plan, Named(step, {"state": image}, places, facts, optimizer), to)
