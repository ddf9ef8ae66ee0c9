"""The child process of a verification: it runs the user's model, the reference and the bundle.

Run as `python -m bigbrain_fx.verification.bundle.child '{"bundle": ...}'`; it writes one JSON
object to the file that "answer" names. It knows the bundle as any user does: it imports its
train.py and runtime.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.core import Input
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend import (
    Captured,
    ModelFile,
    allowed,
    fill,
    graph_inputs,
    load_model_file,
    quantise,
    unit_of,
)
from bigbrain_fx.plan import Plan, half_sums, half_sums_text, read_plan, turned_text
from bigbrain_fx.runtime import WeightsError, filled_up
from bigbrain_fx.verification.bundle.again import capture_again
from bigbrain_fx.verification.bundle.failures import error_of
from bigbrain_fx.verification.bundle.inference import inference_checks
from bigbrain_fx.verification.bundle.loop import PlainLoop, lacking, plain_loop
from bigbrain_fx.verification.bundle.members import (
    MembersReference,
    joined_weights,
    same_graph,
    same_leaves,
    train_members,
    whole_plan,
)
from bigbrain_fx.verification.bundle.module import (
    SEEDS,
    differences,
    equal,
    link as _check,
    relative_error,
)
from bigbrain_fx.verification.bundle.plain import STEPS, not_run, plain_link
from bigbrain_fx.verification.bundle.readings import read_alike
from bigbrain_fx.verification.bundle.reference import Reference, Trace
from bigbrain_fx.verification.bundle.roundly import same_to_rounding
from bigbrain_fx.verification.bundle.stale import trained_once
from bigbrain_fx.weights import part_name, source_of_weights, trained_steps

if TYPE_CHECKING:  # what runs is the bundle's own copy
    from bigbrain_fx.runtime import Device, Stream


def main() -> None:
    """Verify as asked on the command line; write the checks, or the error, as JSON."""
    wanted = json.loads(sys.argv.pop())  # a model file may parse words of its own, and has none
    torch.set_num_threads(1)
    try:
        message: dict[str, Any] = {"checks": verify_here(wanted)}
    except BigBrainError as error:
        message = {"error": error.fields}
    except Exception as error:
        model = wanted["model"] or read_plan(Path(wanted["bundle"])).source.path
        known = error_of(error, Path(wanted["bundle"]), Path(model.partition(":")[0]))
        message = {"error": known.fields} if known else {"internal": traceback.format_exc()}
    Path(wanted["answer"]).write_text(json.dumps(message))


def verify_here(wanted: Mapping[str, Any]) -> list[dict[str, object]]:
    """Run all checks in this process."""
    folder = Path(wanted["bundle"])
    plan = read_plan(folder)
    if plan.mode == "train" and plan.graph.loss is None:
        raise InputError(
            "this bundle has no loss to train on",
            at=str(folder),
            help="add loss(output, batch) to the model file and split it again, "
            "or split it with --mode eval",
        )
    checkpoint = source_of_weights(folder / "weights")
    location = wanted["model"] or plan.source.path
    with plain_loop(plan, folder, location, weights_of) as plain:
        return _verify(wanted, plan, folder, location, checkpoint, plain)


def _verify(
    wanted: Mapping[str, Any],
    plan: Plan,
    folder: Path,
    location: str,
    checkpoint: Path | None,
    plain: PlainLoop | None,
) -> list[dict[str, object]]:
    blank, cache = checkpoint is not None, plan.source.cache
    file = load_model_file(location, seed=plan.seed, blank=blank, cache=cache)
    sys.path.insert(0, str(file.path.parent))
    if plan.source.quantize:
        quantise(file.model)
    captured, processes, steps = capture_again(file, plan), wanted["processes"], wanted["steps"]
    if checkpoint is not None:  # not before: `split` had no numbers either when it decided
        fill(file.model, checkpoint)
    if plan.mode == "eval":
        outputs = Path(processes["outputs"]) if processes else None
        return inference_chain(file, captured, plan, folder, steps, outputs)
    trained = _processes(processes) if processes else None
    return chain(file, captured, plan, folder, steps, trained, plain)


def inference_chain(
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    folder: Path,
    steps: int,
    outputs: Path | None = None,
) -> list[dict[str, object]]:
    """Compare module, captured graph and a bundle for inference; as `chain` does for training."""
    bundle, weights = import_bundle(folder), weights_of(folder, plan)
    same = _same_weights(captured, weights, plan, folder)
    return [same, *inference_checks(file, captured, plan, bundle, weights, steps, outputs)]


def chain(
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    folder: Path,
    steps: int,
    trained: Trace | None = None,
    plain: PlainLoop | None = None,
) -> list[dict[str, object]]:
    """Compare module, captured graph, reference and bundle; a `passed` and a `detail` per link.

    Args:
        file: the model file, loaded here.
        captured: its capture, of which the plan was made.
        plan: what the bundle runs.
        folder: the bundle; imported here.
        steps: training steps.
        trained: what real processes made of them; else the bundle is run in this process.
        plain: the loop in plain PyTorch, of a model file that this process has not run itself.
    """
    bundle = import_bundle(folder)
    weights = weights_of(folder, plan)
    if plan.placement.tensor is not None:
        given = file, captured, plan, folder, steps, trained, plain
        return _chain_of_members(bundle, weights, *given)
    checks = [
        _same_loop(plain, file, captured, plan, folder, min(steps, STEPS)),
        _same_module(file, captured, plan),
        _same_weights(captured, weights, plan, folder),
    ]
    reference = Reference(plan.graph, plan.stages, weights, captured.functions)
    stream = batches_of(bundle, plan)
    whole = Reference(plan.graph, plan.stages, weights, captured.functions, leaves_per_stage=False)
    checks.append(_same_grouping(reference, whole, stream(0), plan.seed))
    about = plan.graph, plan.stages, weights, captured.functions
    expected = trained_once(about, stream, bundle.BUNDLE.training, steps, plan.seed)
    rounds = plan.stages.compiled or (plan.stages.by_backend and trained is not None)
    actual = trained or run_bundle(bundle, plan, steps, plan.seed)
    if rounds:
        unit = unit_of(plan.graph, weights)
        how = {"compiled": plan.stages.compiled}
        return [*checks, *same_to_rounding(weights, expected, actual, unit, **how)]
    return [*checks, *map(partial(_in_order, plan), same_training(plan, expected, actual))]


def _in_order(plan: Plan, check: dict[str, object]) -> dict[str, object]:
    """Say of sums by torch's collectives that one process has none."""
    if not plan.stages.by_backend:
        return check
    said = "replicas added in their order; --processes compares torch's collectives, to rounding"
    return {**check, "detail": f"{check['detail']} ({said})"}


def _chain_of_members(
    bundle: ModuleType,
    weights: Mapping[str, Tensor],
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    folder: Path,
    steps: int,
    trained: Trace | None,
    plain: PlainLoop | None,
) -> list[dict[str, object]]:
    """Compare as `chain` does, with one link more: the graph, and what members run of it."""
    whole, functions = whole_plan(plan), captured.functions
    stream = batches_of(bundle, plan)
    limit = allowed(unit_of(plan.graph, weights))
    checks = [
        _same_loop(plain, file, captured, whole, folder, min(steps, STEPS)),
        _same_module(file, captured, whole),
        _same_weights(captured, weights, whole, folder),
        same_graph(captured, plan),
        same_leaves(plan, weights, functions, stream(0), limit),
    ]
    reference = MembersReference(plan, weights, functions)
    expected = train_members(reference, stream, bundle.BUNDLE.training, steps, plan.seed)
    actual = trained or run_bundle(bundle, plan, steps, plan.seed)
    return [*checks, *same_training(plan, expected, actual)]


def _processes(found: Mapping[str, Any]) -> Trace:
    folders = Path(found["gradients"]), Path(found["tensors"])
    return trace_of_processes(found["losses"], *folders)


def import_bundle(folder: Path) -> ModuleType:
    """Import the bundle's train.py, or infer.py, with its own runtime."""
    sys.path.insert(0, str(folder.resolve()))
    entry = "train" if (folder / "train.py").is_file() else "infer"
    return read_alike(importlib.import_module(entry))


def weights_of(folder: Path, plan: Plan) -> dict[str, Tensor]:
    """Read a bundle's weights, under every name of the model that the plan knows."""
    found: dict[str, Tensor] = {}
    try:
        found.update(joined_weights(folder / "weights", plan))
    except WeightsError as error:
        raise InputError(str(error), at=str(folder / "weights")) from error
    for param in plan.graph.params:  # a tied name that no stage uses has its twin's weights
        if param.canonical in found or param.name in found:
            twin = found.get(param.name, found.get(param.canonical))
            assert twin is not None
            found.setdefault(param.canonical, twin)
            found.setdefault(param.name, twin)
    for param in plan.graph.params:
        shape, dtype = [int(dim) for dim in param.spec.shape], getattr(torch, param.spec.dtype)
        found.setdefault(param.name, torch.zeros(shape))  # nothing reads it
        found[param.name] = found[param.name].to(dtype)  # a checkpoint may have another type
    return found


def batches_of(bundle: ModuleType, plan: Plan) -> Callable[[int], list[Mapping[str, Tensor]]]:
    """Return step -> its micro-batches, from a new data stream of an imported bundle."""
    made = _new_stream(bundle, plan)

    def micro_batches(step: int) -> list[Mapping[str, Tensor]]:
        made.advance(step)
        sizes = getattr(made, "sizes", ()) or (1,) * plan.micro_batches  # of an older bundle
        counted = [m for m, rows in enumerate(sizes) if rows]
        return [{name: made.get(name, m).clone() for name in made.inputs} for m in counted]

    return micro_batches


def _new_stream(bundle: ModuleType, plan: Plan) -> Stream:
    data = importlib.import_module("runtime.data")  # the bundle's own copy
    b = bundle.BUNDLE
    own = getattr(b, "splitting", None)  # an older bundle has none
    how = {"splitting": own, "specs": b.specs} if own is not None else {}
    stream: Stream = data.Stream(
        b.batches, plan.seed, b.inputs, b.whole, plan.micro_batches, torch.device("cpu"), **how
    )
    return stream


# --------------------------------------------------------------------------- the links of the chain


def _same_loop(
    plain: PlainLoop | None,
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    folder: Path,
    steps: int,
) -> dict[str, object]:
    if plain is not None:
        return plain_link(plain, file, captured, plan, steps)
    reason = lacking(plan)
    if reason:
        return not_run(reason)
    with plain_loop(plan, folder, file.location, weights_of) as loop:
        assert loop is not None
        return plain_link(loop, file, captured, plan, steps)


def _same_module(file: ModelFile, captured: Captured, plan: Plan) -> dict[str, object]:
    rows = captured.graph.static_batch or plan.rows
    batches = [captured.inputs(rows)]
    if file.batches is not None:
        batch = next(iter(file.batches(plan.seed + 1)))
        inputs = graph_inputs(captured.graph, batch, plan.source.batch_dims)
        batches.append(
            {
                e.name: _like(e, inputs[e.name][:rows] if e.batched else inputs[e.name], plan)
                for e in captured.graph.inputs
            }
        )
    elif captured.graph.static_batch is None:
        batches.append(captured.inputs(rows + 1))
    found = differences(file, captured, batches)
    limit = allowed(unit_of(captured.graph, captured.tensors))
    compared = f"loss, outputs, buffers bitwise; gradients to {limit:g}"
    what = f"{len(batches)} batches, {len(SEEDS)} seeds: {compared}"
    return _check("your module = captured graph", found, what)


def _like(entry: Input, value: Tensor, plan: Plan) -> Tensor:
    """Fill up an entry that the model file says to be filled up."""
    fill = plan.source.pad.get(entry.name)
    shape = [int(size) for size in entry.spec.at(plan.rows).shape]
    return value if fill is None else filled_up(value, shape, fill, first=entry.batched)


def _same_weights(
    captured: Captured, weights: Mapping[str, Tensor], plan: Plan, folder: Path
) -> dict[str, object]:
    """Compare weights; those of a run that was moved with names and shapes only."""
    steps = trained_steps(folder / "weights")
    param = plan.graph.param
    held = {param[name].canonical for stage in plan.stages.stages for name in stage.params}
    used = [name for name in captured.tensors if name in param and param[name].canonical in held]
    if steps is not None:
        found = [
            f"{name} has another shape or type than in the model"
            for name in used
            if captured.tensors[name].shape != weights[name].shape
            or captured.tensors[name].dtype != weights[name].dtype
        ]
        what = f"{len(used)} names, shapes, types; the numbers are those of step {steps} of a run"
        return _check("weights fit your model", found, what)
    found = [
        f"{name} has other numbers than the model"
        for name in used
        if captured.tensors[name].shape != weights[name].shape
        or not equal(weights[name], captured.tensors[name].detach())
    ]
    return _check("weights = your model's", found, f"{len(used)} tensors bitwise")


def _same_grouping(
    reference: Reference, plain: Reference, micro_batches: Sequence[Mapping[str, Tensor]], seed: int
) -> dict[str, object]:
    _, expected = plain.gradients(list(micro_batches), seed, 0)
    _, actual = reference.gradients(list(micro_batches), seed, 0)
    errors = {name: relative_error(actual.get(name), want) for name, want in expected.items()}
    coarse = {*half_sums(plain.graph, plain.stages)}
    limits = {n: allowed(unit_of(plain.graph, plain.tensors) if n in coarse else 0) for n in errors}
    found = [f"gradient of {n} differs by {e:.1e}" for n, e in errors.items() if e > limits[n]]
    worst = f"largest difference {max(errors.values(), default=0.0):.1e} of a tensor's maximum"
    most = f"(allowed {max(limits.values(), default=0.0):g})"
    rounded = (*half_sums_text(plain.graph, plain.stages), *turned_text(plain.graph))
    said = "; ".join((f"{worst} {most}", *rounded))
    return _check(
        "captured graph = reference", found, f"{len(expected)} gradients of step 0, {said}"
    )


def same_training(plan: Plan, expected: Trace, actual: Trace) -> list[dict[str, object]]:
    """Compare two training runs: losses, gradients of step 0, tensors at the end; three checks."""
    losses = [
        f"step {step}: {float(want):.9g} and {float(found):.9g}"
        for step, (want, found) in enumerate(zip(expected.losses, actual.losses, strict=True))
        if not equal(found, want)
    ]
    gradients = [
        f"gradient of {n}"
        for n, g in expected.gradients.items()
        if not _has(actual.gradients, n, g)
    ]
    trained = {n: t for n, t in expected.tensors.items() if n in actual.tensors}
    tensors = [n for n, t in trained.items() if not _has(actual.tensors, n, t)]
    parts = {(s.param, s.member) for s in plan.sharded.shards}
    held = {(p, s.member) for s in plan.stages.stages for p in s.params}
    stored = {part_name(*each) if each in parts else each[0] for each in held}
    missing = stored - set(actual.tensors)
    tensors += [f"{name} differs between members" for name in sorted(expected.unlike)]
    tensors += [f"{name} is missing" for name in sorted(missing)]
    tensors += [f"{name} differs between the devices that hold it" for name in actual.unlike]
    steps = len(expected.losses)
    found = [
        _check("reference = bundle, losses", losses, f"{steps} steps bitwise"),
        _check(
            "reference = bundle, gradients",
            gradients,
            f"{len(expected.gradients)} tensors of step 0 bitwise",
        ),
        _check(
            "reference = bundle, weights",
            tensors,
            f"{len(trained)} tensors after {steps} steps bitwise",
        ),
    ]
    return [_unless_left_out(check, expected) for check in found]


def _unless_left_out(check: dict[str, object], expected: Trace) -> dict[str, object]:
    """Say "not run" of a link that holds because a loss scale left out what it would compare."""
    first, every = 0 in expected.left_out, len(expected.left_out) == len(expected.losses)
    nothing = (every and "weights" in str(check["name"])) or (
        first and "gradients" in str(check["name"])
    )
    if not nothing or not check["passed"]:
        return check
    what = "all updates" if every else "the update of step 0"
    detail = f"the loss scale left out {what}: give grad_scaler a smaller init_scale to compare it"
    return {**check, "passed": None, "detail": detail}


def _has(found: Mapping[str, Tensor], name: str, want: Tensor) -> bool:
    return name in found and equal(found[name], want)


# --------------------------------------------------------------------------- the bundle


def run_bundle(bundle: ModuleType, plan: Plan, steps: int, seed: int) -> Trace:
    """Train an imported bundle, all devices in this process."""
    trace = Trace()
    losses: dict[int, Tensor] = {}

    def after_step(device: Device, step: int) -> None:
        if step == 0:
            found = device.first_gradients or {}
            trace.take(trace.gradients, {name: g.clone() for name, g in found.items()})

    def report(step: int, loss: float, _: float) -> None:
        losses[step] = torch.tensor(loss, dtype=torch.float64)

    runtime = importlib.import_module("runtime.train")
    known = inspect.signature(runtime.run_in_process).parameters  # a bundle may be older
    policy = {"on_nan": "ignore"} if "on_nan" in known else {}
    with tempfile.TemporaryDirectory() as store:  # the planned ones may be on other machines
        offloads = any(getattr(device, "offload", ()) for device in bundle.BUNDLE.devices)
        told = replace(bundle.BUNDLE, store=store) if offloads else bundle.BUNDLE
        devices = runtime.run_in_process(told, steps, seed, report, after_step, **policy)
    trace.losses.extend(losses[step] for step in sorted(losses))
    for device in devices.values():
        trace.take(trace.tensors, device.state())
    return trace


def trace_of_processes(losses: Sequence[float], gradients: Path, tensors: Path) -> Trace:
    """Read what the processes of a real run left: losses by step, two folders of safetensors."""
    trace = Trace(losses=[torch.tensor(loss, dtype=torch.float64) for loss in losses])
    for path in sorted(gradients.glob("*.safetensors")):
        trace.take(trace.gradients, load_file(path))
    for path in sorted(tensors.glob("*.safetensors")):
        trace.take(trace.tensors, load_file(path))
    return trace


if __name__ == "__main__":
    main()
    os._exit(0)  # a model file may leave threads behind
