"""An optimizer of this process that has made steps, as a commit of a bundle that was just split."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.bundles.resplitting.moving import write_commit
from bigbrain_fx.bundles.resplitting.named import Named, places_of
from bigbrain_fx.emit import batch_specs
from bigbrain_fx.plan import Plan
from bigbrain_fx.weights import (
    Copy,
    Scratch,
    read_header,
    stored_tensors,
    tensors_apart,
    write_file,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def commit_of_caller(
    plan: Plan, bundle: Path, module: nn.Module, optimizer: Optimizer, to: Path
) -> None:
    """Write the bundle's weights and the optimizer's state as its commit of step 0.

    Args:
        plan: of the bundle, without tensor groups.
        bundle: split from the module.
        module: the caller's.
        optimizer: steps parameters of it.
        to: the folder of commits, to be made.

    Raises:
        StateError: the optimizer keeps what is no number.
        OSError: it cannot be written.
    """
    from safetensors.torch import save_file

    from bigbrain_fx.runtime import optimizer_facts, optimizer_tensors

    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    with Scratch("state") as scratch:
        own, image = Path(scratch, "optimizer.safetensors"), Path(scratch, "image.safetensors")
        save_file(tensors_apart(optimizer_tensors(optimizer, parameters)), own)
        weights = stored_tensors(bundle / "weights")
        held = {
            f"{'parameter' if p.kind == 'parameter' else 'buffer'}:{p.canonical}": weights[p.name]
            for p in plan.graph.params
            if p.name in weights
        }
        held |= read_header(own)
        write_file(image, [Copy(name, stored.dtype, stored) for name, stored in held.items()])
        facts = {
            "seed": plan.seed,
            "micro_batches": plan.micro_batches,
            "inputs": {name: [d, list(shape)] for name, (d, shape) in batch_specs(plan).items()},
            "torch": version("torch"),
            "loss_scale": None,
        }
        found = optimizer_facts(optimizer, parameters, rates)
        write_commit(plan, Named(0, {"caller": image}, places_of(image, 0), facts, found), to)
