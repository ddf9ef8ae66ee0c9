"""Files of torch.distributed.checkpoint for a model and its optimizer, as a commit of that model.

Buffers outside the state dict are as the bundle has them; seed and micro-batches are the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigbrain_fx.bundles.dcp_import import dcp_tensors
from bigbrain_fx.bundles.resplitting.named import Named, facts_of_plan, places_of
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan import Plan, require_float
from bigbrain_fx.weights import (
    Checkpoint,
    Copy,
    Stored,
    match,
    stored_tensors,
    whole_tensors,
    write_file,
)


def read_dcp(folder: Path, plan: Plan, bundle: Path, image: Path) -> Named:
    """Read a checkpoint of a plan's model into one file, chunks put together.

    Args:
        folder: what dcp.save wrote.
        plan: of the bundle.
        bundle: that has the buffers outside the model's state dict.
        image: the file to write; keep it while the result is needed.

    Raises:
        InputError: it is no such checkpoint, or of another model, or the disk is full. It may lack
            the optimizer's state, the number of steps, or the first rates of a schedule.
    """
    require_float(plan, "--from-dcp")
    params = plan.graph.params
    names = {p.name: p.canonical for p in params if p.kind != "constant"}
    found = dcp_tensors(folder, names, image.with_name("dcp.safetensors"))
    _require_first_rates(plan, found.facts, folder)
    fit = match(params, Checkpoint(folder.resolve(), found.model))
    _require_types(plan, fit.sources, folder)
    held = {_full(plan, name): fit.sources[name] for name in fit.sources}
    shapes = {p.name: [int(n) for n in p.spec.shape] for p in params}
    apart = image.with_name("weights.safetensors")  # parts of a tensor group's ranks, if any
    unsaved = whole_tensors(stored_tensors(bundle / "weights"), plan.sharded.shards, shapes, apart)
    held |= {f"buffer:{p.canonical}": unsaved[p.name] for p in params if p.kind == "constant"}
    held |= {f"optimizer:{kind}:{name}": t for (kind, name), t in found.optimizer.items()}
    copies = [Copy(name, tensor.dtype, tensor) for name, tensor in held.items()]
    told = "cannot put the checkpoint's tensors together"
    with os_error_as(told, code="BX3093", at=image, help="free some space, or give another --out"):
        write_file(image, copies)
    places = places_of(image, found.step)
    return Named(found.step, {"dcp": image}, places, facts_of_plan(plan), found.facts)


def _require_first_rates(plan: Plan, facts: Mapping[str, Any], where: Path) -> None:
    """Refuse learning rates whose first value, which this bundle's schedule multiplies, is unknown.

    The `lr` of such a state already has the earlier schedule's factor: it would be lowered twice.
    """
    if not (plan.source.has_lr_scale or plan.source.has_scheduler):
        return
    groups = {name: facts["hyper"][number]["group"] for name, number in facts["of"].items()}
    lacking = sorted(name for name, group in groups.items() if "initial_lr" not in group)
    if lacking:
        what = "scheduler" if plan.source.has_scheduler else "lr_scale"
        raise InputError(
            f"the model file has {what}, and the checkpoint does not say with which rate "
            f"{lacking[0]} began: expected initial_lr beside lr in its parameter group",
            code="BX3094",
            at=str(where),
            help="make a torch.optim.lr_scheduler there before the state is loaded: it puts "
            "initial_lr into param_groups, which get_state_dict then loads and saves",
        )


def _full(plan: Plan, name: str) -> str:
    """Return the name that a state has for a parameter or buffer."""
    param = plan.graph.param[name]
    return f"{'parameter' if param.kind == 'parameter' else 'buffer'}:{param.canonical}"


def _require_types(plan: Plan, sources: Mapping[str, Stored], where: Path) -> None:
    """Refuse other element types than the model's: a state is the numbers as they were."""
    for name, stored in sources.items():
        wanted = plan.graph.param[name].spec.dtype
        if stored.dtype != wanted:
            raise InputError(
                f"{name}: expected {wanted}, found {stored.dtype} in the checkpoint",
                code="BX3095",
                at=str(where),
                help="split the model with its parameters as they are trained there",
            )
