"""Plain loop, captured graph, one-process reference and bundle: a chain of equalities in training.

A bundle that runs the user's own step has no graph: its chain is plain PyTorch = bundle. This file
runs what it is given, and says in which order links are compared; `links` compares.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bigbrain_fx.emit import training_texts
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, ModelFile, allowed, unit_of
from bigbrain_fx.plan import Plan
from bigbrain_fx.verification import laid_tensors
from bigbrain_fx.verification.alone import Alone, Way
from bigbrain_fx.verification.imported_bundle import (
    batches_of,
    import_bundle,
    run_bundle,
    weights_of,
)
from bigbrain_fx.verification.links import (
    same_grouping,
    same_loop,
    same_training,
    same_weights,
)
from bigbrain_fx.verification.loop import NoLoopError, PlainLoop, lacking
from bigbrain_fx.verification.members import (
    same_graph,
    same_leaves,
    whole_plan,
)
from bigbrain_fx.verification.plain import STEPS, Own, looped_link
from bigbrain_fx.verification.reference import MembersReference, Reference, rows_of
from bigbrain_fx.verification.trace import Trace, same_run, same_to_rounding
from bigbrain_fx.verification.training import train_reference, trained_once

_ENOUGH_S = 20.0  # of a rehearsal: no further step is compared after it


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
    """Compare plain loop, captured graph, reference and bundle; a `passed` and a `detail` per link.

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
    bundle, weights = import_bundle(folder), weights_of(folder, plan)
    written, own = _written(captured, plan), _own(bundle, plan, folder)
    is_divided = plan.placement.tensor is not None
    links = _links_of_members if is_divided else _links_of_graph
    checks = [
        same_loop(plain, file, captured, written, folder, own, min(steps, STEPS)),
        same_weights(captured, weights, written if is_divided else plan, folder),
        *links(bundle, weights, captured, plan, steps),
    ]
    expected = _expected(bundle, plan, weights, captured.functions, steps)
    actual = trained or _trained(alone, plan, folder, steps)
    return [*checks, *_same_run(plan, weights, expected, actual, by_processes=trained is not None)]


def _written(captured: Captured, plan: Plan) -> Plan:
    """Return the plan of the graph as the model file has it: not divided."""
    return whole_plan(plan) if plan.placement.tensor is not None else plan


def _links_of_graph(
    bundle: ModuleType,
    weights: Mapping[str, Tensor],
    captured: Captured,
    plan: Plan,
    _steps: int,
) -> list[dict[str, object]]:
    """Compare the graph with the sums of its stages."""
    about = plan.graph, plan.stages, weights, captured.functions
    stages, whole = Reference(*about), Reference(*about, leaves_per_stage=False)
    grouped = same_grouping(stages, whole, batches_of(bundle, plan)(0), plan.seed)
    return [grouped]


def _links_of_members(
    bundle: ModuleType,
    weights: Mapping[str, Tensor],
    captured: Captured,
    plan: Plan,
    steps: int,
) -> list[dict[str, object]]:
    """Compare the graph with what ranks run of it."""
    few = _fewest_rows(bundle, plan, steps)
    limit = allowed(unit_of(plan.graph, weights))
    return [
        same_graph(captured, plan),
        *([same_graph(captured, plan, few)] if few < plan.rows else []),
        same_leaves(plan, weights, captured.functions, batches_of(bundle, plan)(0), limit),
    ]


def rehearsed_links(
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    folder: Path,
    loop: PlainLoop,
    alone: Alone,
    way: Way,
) -> list[dict[str, object]]:
    """Compare the loop with the graph, and one process with the bundle, over a few steps.

    Args:
        file: the model file, loaded here.
        captured: its capture, of which the plan was made.
        plan: what the bundle runs.
        folder: the bundle; imported here.
        loop: it has begun, in a process that has not run the model file before.
        alone: waits, in another such process.
        way: how the bundle is trained there.
    """
    bundle, weights = import_bundle(folder), weights_of(folder, plan)
    written, own = _written(captured, plan), _own(bundle, plan, folder)
    first, steps = looped_link(loop, file, captured, written, own, STEPS, _ENOUGH_S)
    if not steps:
        return [first]
    alone.begin(folder, steps, way)
    expected = _expected(bundle, plan, weights, captured.functions, steps)
    actual = alone.train(folder, plan, steps)
    return [first, *_same_run(plan, weights, expected, actual, by_processes=False)]


def _trained(alone: Alone | None, plan: Plan, folder: Path, steps: int) -> Trace:
    """Train a bundle in a process of its own, or in this one where there is none."""
    if alone is None:
        return run_bundle(import_bundle(folder), plan, steps, plan.seed)
    return alone.train(folder, plan, steps)


def _expected(
    bundle: ModuleType,
    plan: Plan,
    weights: Mapping[str, Tensor],
    functions: Mapping[str, object],
    steps: int,
) -> Trace:
    """Train in one process as the plan says, by the graph."""
    stream, training = batches_of(bundle, plan), bundle.BUNDLE.training
    if plan.placement.tensor is not None:
        reference = MembersReference(plan, weights, functions)
        return train_reference(reference, stream, training, steps, plan.seed)
    about = plan.graph, plan.stages, weights, functions
    return trained_once(about, stream, training, steps, plan.seed)


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


def _fewest_rows(bundle: ModuleType, plan: Plan, steps: int) -> int:
    """Return the rows of the smallest micro-batch of these steps."""
    if plan.source.drop_last is not False:
        return plan.rows
    stream = batches_of(bundle, plan)
    return min(rows for step in range(steps) for rows in rows_of(plan.graph, stream(step)))


# --------------------------------------------------------------------------- the user's own step

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
    have = trained or _trained(alone, plan, folder, steps)
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
