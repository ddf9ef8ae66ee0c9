"""nn.Module -> Graph: find how the batch reaches forward, and capture the traced part.

The main entry of the package. The module knows nothing of devices, stages or emitted code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigbrain_fx.errors import BigBrainError, CaptureError
from bigbrain_fx.frontend.device_dependence import device_lines
from bigbrain_fx.frontend.tracing.autocast_regions import without_autocast_regions
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.capture_job import CaptureJob
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.tracing.export import Lengths, without_gc
from bigbrain_fx.frontend.tracing.ladder import Ladder
from bigbrain_fx.frontend.tracing.objective import (
    require_loss,
    require_python,
    require_sizes,
)
from bigbrain_fx.frontend.tracing.opaque.chosen_lines import state_lines
from bigbrain_fx.frontend.tracing.opaque.enclosing_module import KeptWhole, enclosing
from bigbrain_fx.frontend.tracing.opaque.outlined import outlined
from bigbrain_fx.frontend.tracing.opaque.recording import Leaves
from bigbrain_fx.frontend.tracing.opaque.whole_loss import VARIES, of_loss_alone, with_varying
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.state.hidden_state import modules_with_state
from bigbrain_fx.frontend.tracing.step import (
    Loss,
    Route,
    Step,
    class_name,
    input_names,
    modes_kept,
    route,
    settle,
    without_fast_path,
)
from bigbrain_fx.frontend.translation.batch import Batch, take_apart, to_meta
from bigbrain_fx.frontend.translation.batch_dims import BatchDims, Key
from bigbrain_fx.frontend.translation.leaf import find_leaves
from bigbrain_fx.frontend.translation.oracle import Oracle
from bigbrain_fx.frontend.translation.params import tensor_names
from bigbrain_fx.frontend.translation.translate import Labels


def capture(
    module: nn.Module,
    example_batch: object,
    loss: Loss | None = None,
    *,
    training: bool = True,
    name: str | None = None,
    micro_batch: int | None = None,
    autocast: str | None = None,
    assume: Mapping[str, bool] | None = None,
    leaves: Sequence[str] = (),
    loss_needed: bool = False,
    batch_dims: BatchDims | None = None,
    parts: int | None = None,
    strict: bool = False,
    lengths: Mapping[Key, Lengths] | None = None,
    apart: Sequence[tuple[str, str]] = (),
    loss_apart: bool = False,
) -> Captured:
    """Trace a module to a graph, without strictness and with a free batch size.

    The graph computes (loss, outputs): the loss is `loss(output, batch)`, else the scalar output,
    else `output.loss`, else there is none (inference). How a batch reaches forward: `step.route`.
    If the batch size cannot stay free, the graph holds for one size: `micro_batch`, else the
    example's; `graph.static_batch` is that size. On the meta device nothing is compared.

    Args:
        module: traced in train mode (eval mode without `training`); its own modes come back.
        example_batch: tensor, dict, tuple or list, nested at will; dimension 0 is the batch.
        loss: the objective.
        training: whether dropout and batch norm behave as in training. Without it there is no loss:
            `loss` only names entries of the batch that forward does not read.
        name: name of the graph, the class's when left out.
        micro_batch: rows of a micro-batch, for a trace of fixed size.
        autocast: "bfloat16" or "float16": forward and loss run under torch.autocast.
        assume: "model.py:31" -> whether the condition in that line holds, where a tensor's value
            decides; plain runs decide when left out.
        leaves: opaque modules, by path or class name, beside those marked by `leaf`.
        loss_needed: refuse a model that is to be trained and has no loss with a gradient.
        parts: number of parts of the batch, of which the example is one; None: it is the batch.
        lengths: dimensions by entry that are shorter in other batches; the example is the longest.
        batch_dims: the batch's dimension by entry, None for none; left out: 0, where rows fit.
        strict: refuse code that no trace can hold; else the smallest module around it is opaque.
        apart: paths of modules with traces that differ from them, each with the difference: opaque
            in that order, one after another.
        loss_apart: the loss is opaque, and its own entries have other shapes in other batches. The
            graph holds for the example's rows, in one micro-batch.

    Raises:
        InputError: the batch does not fit forward, or the module fails on it.
        CaptureError: torch.export cannot follow the module; names the user's line.
    """
    on_meta = _require_traceable(module, loss)
    example_batch = to_meta(example_batch) if on_meta else example_batch
    with outlined(module, leaves):
        opaque = find_leaves(module, leaves).keys() if strict else None
    how, vary = _route(module, loss, example_batch, training, loss_apart)
    names = input_names(module, example_batch, how)
    batch = take_apart(example_batch, names, tensor_names(module), batch_dims, vary)
    with _in_mode(module, training):
        look = partial(modules_with_state, module, loss, batch, how, autocast)
        stateful = _stateful(module, look, opaque, leaves) if training else look(()) and ()
    batch = batch.with_lengths(lengths or {})
    rows, is_fixed = batch.rows * (parts or 1), loss_apart or parts is not None
    labels = Labels(name or class_name(module), rows, training, autocast, is_fixed=is_fixed)
    attempt = partial(
        _attempted,
        *(module, loss, batch, how, labels, dict(assume or {})),
        micro_batch=micro_batch,
        stateful=stateful,
        loss_apart=loss_apart,
    )
    device = torch.device("meta") if on_meta else nullcontext()
    with _in_mode(module, training), device:
        own = tuple(leaves)
        captured = (
            attempt(KeptWhole(own))
            if strict
            else enclosing(module, own, attempt, apart, stateful or ())
        )
    if training and loss_needed:
        require_loss(captured.graph)
    graph = with_varying(captured.graph, vary)
    return replace(captured, graph=graph, device_lines=device_lines(module, loss))


def _stateful(
    module: nn.Module,
    look: Callable[[Collection[str] | None], tuple[str, ...] | None],
    opaque: Collection[str] | None,
    leaves: Sequence[str],
) -> tuple[str, ...] | None:
    """Return the modules with state; of a forward that has it the lines that assign it.

    Raises:
        CaptureError: it is elsewhere, or only the modules in `opaque` may have any.
    """
    try:
        with outlined(module, leaves):
            return look(opaque)
    except CaptureError as error:
        lines = state_lines(module) if error.family == "BX0160" and opaque is None else ()
        if not lines:
            raise
        with suppress(BigBrainError), outlined(module, (*leaves, *lines)):
            return look(opaque)
        raise


def _route(
    module: nn.Module, loss: Loss | None, example: object, training: bool, loss_apart: bool
) -> tuple[Route, tuple[Key, ...]]:
    """Return the route of a batch into forward, and the keys that only an opaque loss reads."""
    how = route(module, example, loss is not None)
    if loss is not None and training:
        how = settle(module, how, example, partial(_has_loss, module, loss, example))
    return how, of_loss_alone(example, how) if loss_apart else ()


def _require_traceable(module: nn.Module, loss: Loss | None) -> bool:
    """Refuse modules that no trace can start from; return whether it is on the meta device."""
    require_python(module, loss)
    require_sizes(module)
    return any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers()))


@contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module into a mode for a trace; its own modes come back."""
    with modes_kept(module), without_gc(), nullcontext() if training else without_fast_path():
        module.train(training)
        yield


def _attempted(
    module: nn.Module,
    loss: Loss | None,
    batch: Batch,
    how: Route,
    labels: Labels,
    assume: dict[str, bool],
    whole: KeptWhole,
    *,
    micro_batch: int | None,
    stateful: tuple[str, ...] | None,
    loss_apart: bool,
) -> Captured:
    """Capture with these opaque parts of the module."""
    blank = any(is_blank(t) for t in (*module.parameters(), *module.buffers()))

    def run(labels: Labels, *, casts_itself: bool = False) -> Captured:
        step = Step(module, loss, batch, how, labels.training)
        step.casts_itself = casts_itself
        plain = Plain(step, module, None if casts_itself else labels.autocast)
        found = Leaves(find_leaves(module, whole.leaves), stateful=stateful)
        ladder = Ladder(step, batch, plain, not blank, Oracle(dict(assume)), found)
        if loss_apart:
            ladder.keep_loss(VARIES)
        return CaptureJob(step, batch, labels, blank, ladder).run(micro_batch)

    with outlined(module, whole.leaves):
        return without_autocast_regions(run, labels)


def _has_loss(module: nn.Module, loss: Loss, batch: object, how: Route) -> bool:
    """Whether the user's loss function gives a scalar when the batch reaches forward this way."""
    taken = take_apart(batch)
    step, example = Step(module, loss, taken, how), list(taken.sized(taken.rows).values())
    blank = any(is_blank(t) for t in (*module.parameters(), *module.buffers()))
    shapes = FakeTensorMode(allow_non_fake_inputs=True) if blank else nullcontext()
    with shapes, contextlib.suppress(Exception):
        Plain(step, module, None).run(example, 0)
        return True
    return False
