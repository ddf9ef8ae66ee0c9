"""The child process of a verification: it runs the user's model, the reference and the bundle.

Run as `python -m bigbrain_fx.verification.beginning '{"bundle": ...}'`; it writes one JSON
object to the file that "answer" names. It knows the bundle as any user does: it imports its
train.py and runtime.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bigbrain_fx.emit import training_texts
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend import (
    Captured,
    ModelFile,
    allowed,
    fill,
    load_model_file,
    memory_error,
    numbers_in,
    quantise,
    unit_of,
    with_number_inputs,
    with_parts,
)
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.verification.again import capture_again
from bigbrain_fx.verification.alone import Alone, alone
from bigbrain_fx.verification.failures import error_of
from bigbrain_fx.verification.imported_bundle import (
    batches_of,
    import_bundle,
    run_bundle,
    trace_of_processes,
    weights_of,
)
from bigbrain_fx.verification.inference import inference_checks
from bigbrain_fx.verification.links import (
    same_grouping,
    same_loop,
    same_module,
    same_training,
    same_weights,
)
from bigbrain_fx.verification.loop import PlainLoop, plain_loop
from bigbrain_fx.verification.members import (
    MembersReference,
    same_graph,
    same_leaves,
    whole_plan,
)
from bigbrain_fx.verification.members_training import train_members
from bigbrain_fx.verification.micro_batches import same_objective
from bigbrain_fx.verification.opaque import opaque_chain
from bigbrain_fx.verification.plain import STEPS, Own
from bigbrain_fx.verification.reference import Reference, Trace, rows_of
from bigbrain_fx.verification.rewritten import as_written, same_rewritten
from bigbrain_fx.verification.roundly import same_to_rounding
from bigbrain_fx.verification.stale import trained_once
from bigbrain_fx.weights import source_of_weights

if TYPE_CHECKING:  # what runs is the bundle's own copy
    pass


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
        known: BigBrainError | None = memory_error(error)
        known = known or error_of(error, Path(wanted["bundle"]), Path(model.partition(":")[0]))
        message = {"error": known.fields} if known else {"internal": traceback.format_exc()}
    Path(wanted["answer"]).write_text(json.dumps(message), encoding="utf-8")


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
        own = forks.enter_context(alone(folder, plan, wanted["steps"])) if trains else None
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


def chain(
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    folder: Path,
    steps: int,
    trained: Trace | None = None,
    plain: PlainLoop | None = None,
    alone: Alone | None = None,
) -> list[dict[str, object]]:
    """Compare module, captured graph, reference and bundle; a `passed` and a `detail` per link.

    Args:
        file: the model file, loaded here.
        captured: its capture, of which the plan was made.
        plan: what the bundle runs.
        folder: the bundle; imported here.
        steps: training steps.
        trained: what real processes made of them; else `alone` runs the bundle, or this process.
        plain: the loop in plain PyTorch, of a model file that this process has not run itself.
        alone: trains the bundle in a process that has not run it either.
    """
    bundle = import_bundle(folder)
    weights = weights_of(folder, plan)
    if plan.placement.tensor is not None:
        given = file, captured, plan, folder, steps, trained, plain, alone
        return _chain_of_members(bundle, weights, *given)
    written, own = as_written(captured, plan), _own(bundle, plan, folder)
    checks = [
        same_loop(plain, file, captured, written, folder, own, min(steps, STEPS)),
        same_module(file, captured, written),
        same_weights(captured, weights, plan, folder),
        *same_rewritten(captured, plan),
    ]
    reference = Reference(plan.graph, plan.stages, weights, captured.functions)
    stream = batches_of(bundle, plan)
    whole = Reference(plan.graph, plan.stages, weights, captured.functions, leaves_per_stage=False)
    checks.append(same_grouping(reference, whole, stream(0), plan.seed))
    about = plan.graph, plan.stages, weights, captured.functions
    expected = trained_once(about, stream, bundle.BUNDLE.training, steps, plan.seed)
    actual = trained or _trained(bundle, plan, steps, alone)
    return [*checks, *_same_run(plan, weights, expected, actual, by_processes=trained is not None)]


def _same_run(
    plan: Plan,
    weights: Mapping[str, Tensor],
    expected: Trace,
    actual: Trace,
    *,
    by_processes: bool,
) -> list[dict[str, object]]:
    """Compare a run with the reference's: bitwise, unless torch compiled it or summed gradients."""
    if plan.stages.compiled or (plan.stages.by_backend and by_processes):
        unit, compiled = unit_of(plan.graph, weights), plan.stages.compiled
        return same_to_rounding(weights, expected, actual, unit, compiled=compiled)
    return [*map(partial(_in_order, plan), same_training(plan, expected, actual))]


def _trained(bundle: ModuleType, plan: Plan, steps: int, alone: Alone | None) -> Trace:
    return alone.train(lambda: bundle) if alone else run_bundle(bundle, plan, steps, plan.seed)


def _own(bundle: ModuleType, plan: Plan, folder: Path) -> Own | None:
    """Return what the bundle has copied of the model file, which may have other values here.

    How a bundle is trained is its user's to change: an edited training.py is not compared.
    """
    with contextlib.suppress(InputError, OSError, SyntaxError):  # the file is not there any more
        there = _statements((folder / "training.py").read_text(encoding="utf-8"))
        if all(_statements(text) <= there for text in training_texts(plan)):
            return Own(bundle.BUNDLE.training, batches_of(bundle, plan))
    return None


def _statements(text: str) -> set[str]:
    """Return what lines of Python do at their top, but for imports."""
    body = ast.parse(text).body
    return {ast.dump(node) for node in body if not isinstance(node, ast.Import | ast.ImportFrom)}


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
    alone: Alone | None,
) -> list[dict[str, object]]:
    """Compare as `chain` does, with one link more: the graph, and what members run of it."""
    whole, functions = whole_plan(plan), captured.functions
    stream = batches_of(bundle, plan)
    few = _fewest_rows(bundle, plan, steps)
    limit = allowed(unit_of(plan.graph, weights))
    own = _own(bundle, plan, folder)
    checks = [
        same_loop(plain, file, captured, whole, folder, own, min(steps, STEPS)),
        same_module(file, captured, whole),
        same_weights(captured, weights, whole, folder),
        same_graph(captured, plan),
        *([same_graph(captured, plan, few)] if few < plan.rows else []),
        same_leaves(plan, weights, functions, stream(0), limit),
    ]
    reference = MembersReference(plan, weights, functions)
    expected = train_members(reference, stream, bundle.BUNDLE.training, steps, plan.seed)
    actual = trained or _trained(bundle, plan, steps, alone)
    return [*checks, *_same_run(plan, weights, expected, actual, by_processes=trained is not None)]


def _fewest_rows(bundle: ModuleType, plan: Plan, steps: int) -> int:
    """Return the rows of the smallest micro-batch of these steps."""
    if plan.source.drop_last is not False:
        return plan.rows
    stream = batches_of(bundle, plan)
    return min(rows for step in range(steps) for rows in rows_of(plan.graph, stream(step)))


def _processes(found: Mapping[str, Any]) -> Trace:
    folders = Path(found["gradients"]), Path(found["tensors"])
    return trace_of_processes(found["losses"], *folders)
