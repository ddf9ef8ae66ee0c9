"""Whether calls of forward give the same numbers for the same batch, from the first call on.

    forward(x), forward(x), ... under one seed, buffers and attributes put back: the same numbers?

What counts calls, to warm something up, may be kept where no state dict finds it: in an object with
slots, a function's attribute, a closure. The first calls are compared before anything else has run
the model; what moves with each is moved far on (`counters`), and forward runs again. What is kept
elsewhere, and acts in the first steps, a rehearsal sees. This file runs steps; it knows no graphs.
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
from bigbrain_fx.frontend.tracing.state import other_weights
from bigbrain_fx.frontend.tracing.step import Loss, Route, Step
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.sources import forward_line

_CALLS = 4
_MOST = 2**28  # bytes of weights, which are copied


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
        call = _first_unlike(plain, example)
        if call is None:
            refusal = _later(step, plain, example)
        else:
            refusal = _goes_on(call, _written_line(step, plain, example) or forward_line(model))
        if moved():
            return  # what writes into weights is told so by others
    if refusal is not None:
        raise refusal


def _goes_on(call: int, at: str | None) -> CaptureError:
    return CaptureError(
        f"call {call} of forward gives other numbers than the first, with the same batch, "
        "weights, buffers and seed: something that no attribute of a module holds counts calls, or "
        "goes on by itself, and a trace would keep what it is now for ever",
        code="BX0160g",
        at=at,
        help=f"{_IN_BUFFER}; leave out the clock; a loss that is a module with buffers is held "
        "by the model, whose forward returns the loss",
    )


def _written_line(step: Step, plain: Plain, example: Sequence[Tensor]) -> str | None:
    """Find the line that writes into a tensor which calls share, if one does."""
    held, loss = tensors((step.model, step.own_loss)), step.own_loss

    def look() -> list[int]:
        own = loss.buffers() if isinstance(loss, nn.Module) else ()
        return [*(t._version for t in held if not t.is_inference()), *map(id, own)]

    return where_changed(lambda: plain.run(example, 0), look)


def _later(step: Step, plain: Plain, example: Sequence[Tensor]) -> CaptureError | None:
    """Return why calls give other numbers once more was counted."""
    found = _decision(step, plain, example)
    if found is None:
        return None
    return _counted(found, _line(step, plain, example, found) or forward_line(step.model))


_IN_BUFFER = (
    "let the model hold it in a buffer, self.register_buffer('calls', torch.zeros(())) in "
    "__init__, write into it in place (self.calls += 1), and read it as a tensor "
    "(torch.clamp(self.calls / 100, max=1.0), or torch.where(self.calls % 100 == 0, new, old) for "
    "if); or let the batch bring it: an entry of batches() with a number for each row"
)


def _counted(found: Decision, at: str | None) -> CaptureError:
    return CaptureError(
        f"forward leaves {found.name} for the next call where no state dict finds it, and "
        f"{found.runs} calls later the same batch, weights, buffers and seed give other numbers: a "
        "trace would keep what it is now for ever",
        code="BX0160i",
        at=at,
        help=_IN_BUFFER,
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


def _line(step: Step, plain: Plain, example: Sequence[Tensor], found: Decision) -> str | None:
    """Find the line that moves it."""
    with _going_on(step) as roots:
        return where_changed(
            lambda: plain.run(example, 0), lambda: look(roots).get(found.name, (None, ()))[1]
        )


@contextlib.contextmanager
def _going_on(step: Step) -> Iterator[tuple[object, ...]]:
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


def _first_unlike(plain: Plain, example: Sequence[Tensor]) -> int | None:
    """Return the number of the first call whose results are not those of call 1."""
    try:
        first = plain.written(example, 0)
        calls = range(2, _CALLS + 1)
        return next((call for call in calls if not alike(first, plain.written(example, 0))), None)
    except Exception as error:
        if isinstance(error, CaptureError) and error.family == "BX0160":
            raise  # a buffer is not what it was, and cannot be put back
        return None  # `trace` says what is wrong with the example


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
