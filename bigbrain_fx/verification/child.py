"""The child process of a verification: it runs the user's model, the reference and the bundle.

Run as `python -m bigbrain_fx.verification.child '{"bundle": ...}'`; its one message has the checks.
It knows the bundle as any user does: it imports its train.py and runtime.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.errors import BigBrainError, FormatWarning, InputError
from bigbrain_fx.frontend import (
    Captured,
    ModelFile,
    Replies,
    answers_in,
    capture,
    fill,
    leaf_paths,
    load_model_file,
    memory_error,
    numbers_in,
    quantise,
    with_lengths,
    with_number_inputs,
    with_parts,
)
from bigbrain_fx.plan import Plan, read_plan, with_frozen
from bigbrain_fx.verification.alone import Alone
from bigbrain_fx.verification.chain import chain, opaque_chain
from bigbrain_fx.verification.failures import error_of
from bigbrain_fx.verification.imported_bundle import (
    import_bundle,
    trace_of_processes,
    weights_of,
)
from bigbrain_fx.verification.inference import inference_checks
from bigbrain_fx.verification.links import (
    same_objective,
    same_weights,
)
from bigbrain_fx.verification.loop import PlainLoop, plain_loop
from bigbrain_fx.verification.trace import Trace
from bigbrain_fx.weights import source_of_weights


def main() -> None:
    """Verify as asked on the command line; report the checks, or the error."""
    wanted, replies = json.loads(sys.argv.pop()), Replies()  # a model file has no words of its own
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FormatWarning)  # the parent process has read the plan, too
    replies.reply(lambda: {"checks": _verified(wanted)})


def _verified(wanted: Mapping[str, Any]) -> list[dict[str, object]]:
    """Run all checks; raise the user's error where an error is one of theirs."""
    try:
        return verify_here(wanted)
    except BigBrainError:
        raise
    except Exception as error:
        model = wanted["model"] or read_plan(Path(wanted["bundle"])).source.path
        known = error_of(error, Path(wanted["bundle"]), Path(model.partition(":")[0]))
        if memory_error(error) is not None or known is None:
            raise
        raise known from error


def verify_here(wanted: Mapping[str, Any]) -> list[dict[str, object]]:
    """Run all checks in this process."""
    folder = Path(wanted["bundle"])
    plan = read_plan(folder)
    if plan.mode == "train" and plan.graph.loss is None:
        raise InputError(
            "this bundle has no loss to train on",
            code="BX3807",
            at=str(folder),
            help="add loss(output, batch) to the model file and split it again, "
            "or split it with --mode eval",
        )
    checkpoint = source_of_weights(folder / "weights")
    location = wanted["model"] or plan.source.path
    with contextlib.ExitStack() as forks:
        plain = forks.enter_context(plain_loop(plan, folder, location, weights_of))
        trains = plan.mode == "train" and not wanted["processes"]
        own = forks.enter_context(Alone()) if trains else None
        return _verify(wanted, plan, folder, location, checkpoint, plain, own)


def _verify(
    wanted: Mapping[str, Any],
    plan: Plan,
    folder: Path,
    location: str,
    checkpoint: Path | None,
    plain: PlainLoop | None,
    own: Alone | None,
) -> list[dict[str, object]]:
    if plan.graph.is_opaque_step:
        trained = _processes(wanted["processes"]) if wanted["processes"] else None
        return opaque_chain(plan, folder, wanted["steps"], plain, own, trained)
    blank, cache = checkpoint is not None, plan.source.cache
    file = load_model_file(location, seed=plan.seed, blank=blank, cache=cache)
    sys.path.insert(0, str(file.path.parent))
    if plan.source.has_micro:
        file = with_parts(file, plan.micro_batches)
    file = with_lengths(file, plan.seed, draws=True) if plan.mode == "train" else file
    file = with_number_inputs(file, numbers_in(plan.graph, file.example_batch))
    if plan.source.quantize:
        quantise(file.model)
    captured, processes, steps = capture_again(file, plan), wanted["processes"], wanted["steps"]
    if checkpoint is not None:  # not before: `split` had no numbers either when it decided
        fill(file.model, checkpoint)
    if plan.mode == "eval":
        outputs = Path(processes["outputs"]) if processes else None
        return inference_chain(file, captured, plan, folder, steps, outputs)
    trained = _processes(processes) if processes else None
    checks = chain(file, captured, plan, folder, steps, trained, plain, own)
    return [*checks, *same_objective(file, captured, plan)]


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
    same = same_weights(captured, weights, plan, folder)
    return [same, *inference_checks(file, captured, plan, bundle, weights, steps, outputs)]


def _processes(found: Mapping[str, Any]) -> Trace:
    folders = Path(found["gradients"]), Path(found["tensors"])
    return trace_of_processes(found["losses"], *folders)


# --------------------------------------------------------------------------- captured again


def capture_again(file: ModelFile, plan: Plan) -> Captured:
    """Capture as `split` did.

    Raises:
        InputError: it gives another graph than the plan's.
    """
    captured = capture(
        file.model,
        file.example_batch,
        file.loss,
        training=plan.graph.training,
        name=plan.graph.name,
        micro_batch=plan.graph.static_batch,
        assume=answers_in(plan.graph),
        leaves=leaf_paths(plan.graph),
        autocast=file.autocast,
        batch_dims=file.batch_dims,
        lengths=file.free,
        parts=plan.micro_batches if plan.source.has_micro else None,
        loss_apart=any(entry.varies for entry in plan.graph.inputs),
    )
    found = captured.graph
    if _unplaced(found) == _unplaced(plan.graph):
        return captured
    if frozen := _frozen_since(found, plan.graph):
        raise InputError(
            f"{file.path.name} trains {frozen[0]}, which this bundle has frozen (resplit --freeze)",
            code="BX3804",
            at=str(file.path),
            help="give --model a copy of the file whose model() freezes it, too, with "
            f"requires_grad_(False), and all of {len(frozen)} parameters that the bundle trains no "
            "more",
        )
    raise InputError(
        f"{file.path.name} gives another graph than the one that was split",
        code="BX3805",
        at=str(file.path),
        help="split it again, or give the file it was split from with --model",
    )


def _frozen_since(found: Graph, planned: Graph) -> list[str]:
    """Return the parameters that are trained by the file and not by the plan, if that is all."""
    trained = {p.name: p.spec.requires_grad for p in found.params}
    frozen = [p.name for p in planned.params if trained.get(p.name) and not p.spec.requires_grad]
    if not frozen or [*trained] != [p.name for p in planned.params]:
        return []
    return frozen if _unplaced(with_frozen(found, frozen)) == _unplaced(planned) else []


def _unplaced(graph: Graph) -> Graph:
    """Leave out where code stands (a file may be moved, and given comments) and what is kept."""
    ops = tuple(_unplaced_op(op) for op in graph.ops)
    return replace(graph, ops=ops, statements=())


def _unplaced_op(op: Op) -> Op:
    calls = (replace(call, type=call.type.rpartition(".")[2]) for call in op.modules)
    body = _unplaced(op.body) if op.body else None
    return replace(op, modules=tuple(calls), source="", lines=(), body=body, saves=None)


if __name__ == "__main__":
    main()
    os._exit(0)  # a model file may leave threads behind
