"""State that calls of forward leave where no state dict finds it, and that later calls go by.

    forward(x), forward(x), ... under one seed, attributes as calls leave them: the same numbers?
    what moved ─▶ as it is 50, 1000, 5040000000 calls later ─▶ forward(x): the same numbers?

A cache that changes nothing is let be; a hidden state or a counter would be a constant of the
trace. What acts in the first steps a rehearsal finds, too; here it is found without a model file,
and what acts later is found at all (`counters`). This file runs steps; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.attributes import Attributes, held_bytes
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.check import CHECK_FLOPS
from bigbrain_fx.frontend.tracing.counters import Decision, decision, look
from bigbrain_fx.frontend.tracing.dice import where_changed
from bigbrain_fx.frontend.tracing.plain import Plain, alike, same_numbers
from bigbrain_fx.frontend.tracing.reached import tensors
from bigbrain_fx.frontend.tracing.step import Loss, Route, Step
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.sources import forward_line

_CALLS = 3
_MOST = 2**28  # bytes of weights, which are copied
_REMEDY = (
    "let the model hold it in a buffer, self.register_buffer('calls', torch.zeros(())) in "
    "__init__, write into it in place (self.calls += 1), and read it as a tensor "
    "(torch.clamp(self.calls / 100, max=1.0), or torch.where(self.calls % 100 == 0, new, old) for "
    "if); or let the batch bring it: an entry of batches() with a number for each row. Parameters "
    "and modules are made in __init__; what only a first call changes (a cache for longer texts) "
    "is there when model() has run the model once; a loss that is a module with buffers is held by "
    "the model, whose forward returns the loss"
)


def require_steady_calls(
    model: nn.Module, loss: Loss | None, batch: Batch, how: Route, autocast: str | None
) -> None:
    """Refuse a model whose calls give unlike numbers for the same batch, now or later.

    Raises:
        CaptureError: they do.
    """
    example = list(batch.sized(batch.rows).values())
    if is_costly(model, example):
        return
    step = Step(model, loss, batch, how)
    plain = Plain(step, model, autocast)
    with _weights_kept(model) as moved:
        refusal = _at_once(step, plain, example, moved) or _later(step, plain, example)
        if moved():
            return  # `objective` refuses writes into weights
    if refusal is not None:
        raise refusal


def require_steady_attributes(step: Step, plain: Plain, batch: Batch) -> None:
    """Refuse a costly model whose attributes were moved by a call, if calls then give others.

    Raises:
        CaptureError: they do.
    """
    example = list(batch.sized(batch.rows).values())
    if step.seen.moved and is_costly(step.model, example):
        refusal = _at_once(step, plain, example, lambda: False)
        if refusal is not None:
            raise refusal


def _at_once(
    step: Step, plain: Plain, example: Sequence[Tensor], moved: Callable[[], bool]
) -> CaptureError | None:
    """Return why the first calls give unlike numbers, where none has moved weights."""
    call = _first_unlike(step, plain, example, moved)
    if not call:
        return None
    names = f" (it moves {', '.join(step.seen.moved[:3])})" if step.seen.moved else ""
    return CaptureError(
        f"{call} of forward gives other numbers than the first, with the same batch, buffers and "
        f"seed: something in no state dict goes on from call to call{names}, and a trace would "
        "keep what it is now for ever",
        code="BX0160g",
        at=_moved_line(step, plain, example) or forward_line(step.model),
        help=_REMEDY,
    )


def _first_unlike(
    step: Step, plain: Plain, example: Sequence[Tensor], moved: Callable[[], bool]
) -> str:
    """Name the first call whose results are not those of call 1."""
    try:
        with _going_on(step) as roots:
            before = Attributes.of(*roots, numbers=False)
            first = plain.written(example, 0)
            if moved():
                return ""
            step.seen.moved = tuple(before.moved(Attributes.of(*roots, numbers=False)))
            for call in range(2, _CALLS + 1):
                if not alike(first, plain.written(example, 0)):
                    return f"call {call}"
            with other_weights(step.model):
                late = plain.written(example, 0)
        with _going_on(step), other_weights(step.model):
            fresh = plain.written(example, 0)
    except Exception as error:
        if isinstance(error, CaptureError) and error.family == "BX0160":
            raise  # a buffer is not what it was, and cannot be put back
        return ""  # `trace` says what is wrong with the example
    return "" if alike(late, fresh) else "a call with other weights"


def _moved_line(step: Step, plain: Plain, example: Sequence[Tensor]) -> str | None:
    """Find the line that writes into an attribute, a count, or a tensor that calls share."""
    held, loss = tensors((step.model, step.own_loss)), step.own_loss
    with _going_on(step) as roots:

        def seen() -> object:
            own = loss.buffers() if isinstance(loss, nn.Module) else ()
            marks = Attributes.of(step.model, loss, numbers=False).marks
            counts = {name: number for name, (_, number) in look(roots).items()}
            written = [t._version for t in held if not t.is_inference()]
            return marks, counts, written, [*map(id, own)]

        return where_changed(lambda: plain.run(example, 0), seen)


def _later(step: Step, plain: Plain, example: Sequence[Tensor]) -> CaptureError | None:
    """Return why calls give other numbers once more was counted."""
    found = _decision(step, plain, example)
    if found is None:
        return None
    return CaptureError(
        f"forward leaves {found.name} for the next call where no state dict finds it, and "
        f"{found.runs} calls later the same batch, weights, buffers and seed give other numbers: a "
        "trace would keep what it is now for ever",
        code="BX0160i",
        at=_counting_line(step, plain, example, found) or forward_line(step.model),
        help=_REMEDY,
    )


def _decision(step: Step, plain: Plain, example: Sequence[Tensor]) -> Decision | None:
    """Return what forward or loss counts and goes by later, attributes or anything else."""
    if not _are_few(tensors((step.model, step.own_loss))):
        return None  # what calls leave could not be put back
    with _going_on(step) as roots, other_weights(step.model):  # copied later, they are others
        try:
            run = partial(plain.left, example, 0)
            return decision(run, run, roots)
        except Exception:
            return None  # `trace` says what is wrong with the example


def _counting_line(
    step: Step, plain: Plain, example: Sequence[Tensor], found: Decision
) -> str | None:
    with _going_on(step) as roots:
        return where_changed(
            lambda: plain.run(example, 0), lambda: look(roots).get(found.name, (None, ()))[1]
        )


@contextlib.contextmanager
def _going_on(step: Step) -> Iterator[tuple[nn.Module, object]]:
    """Let attributes stay as calls leave them, until the end; yield where counters may be."""
    roots = step.model, step.own_loss
    before, step.watch.keeps = Attributes.of(*roots), True
    held = [t for t in tensors(roots) if type(t) in (Tensor, nn.Parameter) and not t.is_inference()]
    numbers = [(t, t._version, t.detach().clone()) for t in held] if _are_few(held) else []
    try:
        yield roots
    finally:
        step.watch.keeps = False
        before.put_back()
        with torch.no_grad():  # a teacher in a list, say, which no module holds
            for tensor, version, kept in numbers:
                if tensor._version != version:
                    tensor.copy_(kept)


def _are_few(held: Sequence[Tensor]) -> bool:
    return sum(map(held_bytes, held)) <= _MOST


@contextlib.contextmanager
def other_weights(model: nn.Module) -> Iterator[None]:
    """Move each trained weight a little in a direction of its own, as training does."""
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    dice = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in trained:
                noise = torch.randn(p.shape, generator=dice).to(p.dtype)
                p.add_(noise, alpha=0.05 * float(p.abs().mean().nan_to_num()) + 0.01)
        yield
    finally:
        with torch.no_grad():
            for p, numbers in zip(trained, before, strict=True):
                p.copy_(numbers)


@contextlib.contextmanager
def _weights_kept(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Put parameters back that forward writes into; yield what tells whether it did."""
    kept = [(p, p.data, p.detach().clone()) for p in model.parameters()]

    def moved() -> bool:
        return any(not same_numbers(p.detach(), numbers) for p, _, numbers in kept)

    try:
        yield moved
    finally:
        with torch.no_grad():
            for parameter, data, numbers in kept:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if not same_numbers(data, numbers):
                    parameter.copy_(numbers)


def is_costly(model: nn.Module, example: Sequence[Tensor]) -> bool:
    """Whether a few calls may take long: by the numbers of weights, and the places of a batch."""
    weights = [*model.parameters(), *model.buffers()]
    if any(is_lazy(t) or t.device.type == "meta" or is_blank(t) for t in weights):
        return True
    if sum(t.nbytes for t in weights) > _MOST:
        return True
    places = max((_places(tensor) for tensor in example), default=1)
    return 2 * sum(p.numel() for p in model.parameters()) * places > CHECK_FLOPS


def _places(tensor: Tensor) -> int:
    """Return how often a batch may pass by a weight: features at the end are no places."""
    shape = tensor.shape[:-1] if tensor.is_floating_point() else tensor.shape
    return math.prod(shape)
