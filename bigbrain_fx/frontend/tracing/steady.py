"""Whether forward gives the same numbers each time that it is asked, from its first call on.

    forward(x), forward(x), ... under one seed, buffers and attributes put back: the same numbers?

What counts calls, to warm something up, may be kept where nobody looks: in an object with slots, a
function's attribute, a closure of a hook, the environment. Once it has counted to its end, a trace
finds a constant. So the first calls are compared before anything else has run the model. This file
runs steps; it knows no graphs.
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
from bigbrain_fx.frontend.tracing.budget import budget
from bigbrain_fx.frontend.tracing.check import CHECK_FLOPS
from bigbrain_fx.frontend.tracing.clock import decided_by_clock
from bigbrain_fx.frontend.tracing.counters import Decision, decision, look
from bigbrain_fx.frontend.tracing.dice import where_changed
from bigbrain_fx.frontend.tracing.keeping import may_keep, unheard
from bigbrain_fx.frontend.tracing.left_gradients import refused_by_gradients
from bigbrain_fx.frontend.tracing.plain import Plain, alike, same_numbers
from bigbrain_fx.frontend.tracing.reached import TextFile, tensors
from bigbrain_fx.frontend.tracing.state import other_weights
from bigbrain_fx.frontend.tracing.step import Loss, Route, Step
from bigbrain_fx.frontend.tracing.world import CLOCK, WORDS, Reads, mentions, watching
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.sources import forward_line

_CALLS, _LOOK_S = (2, 8), 0.1  # at least, at most; and how long more than two may take
_MANY, _MANY_S = 160, 0.1  # calls with gradients once what is known to count was moved; likewise
_MORE, _MORE_S = 2_048, 2.0  # where the user's lines may keep something; likewise
_MOST = 2**28  # bytes of weights, which are copied


def require_steady_calls(
    model: nn.Module, loss: Loss | None, batch: Batch, how: Route, autocast: str | None
) -> Reads | None:
    """Refuse a model whose calls give unlike numbers for the same batch, now or later.

    Returns:
        What forward and loss read of the world; None where nothing was run.

    Raises:
        CaptureError: they do.
    """
    example = list(batch.sized(batch.rows).values())
    if is_costly(model, example):
        return None
    step = Step(model, loss, batch, how)
    plain = Plain(step, model, autocast)
    with _weights_kept(model) as moved:
        with _watch(step) as reads:
            call = _first_unlike(plain, example)
        refusal = (
            _later(step, plain, example, reads)
            if call is None
            else _goes_on(call, _written_line(step, plain, example) or forward_line(model))
        )
        if moved():
            return reads  # what writes into weights is told so by others
    if refusal is not None:
        raise refusal
    return reads


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


def _later(
    step: Step, plain: Plain, example: Sequence[Tensor], reads: Reads
) -> CaptureError | None:
    """Return why calls give other numbers once more was counted, or it is later."""
    if _is_moved_by_backward(step, plain, example):
        return _left_by_backward(forward_line(step.model))
    found = _decision(step, plain, example, reads)
    if found is not None:
        at = _line(step, plain, example, found, reads) or forward_line(step.model)
        return _counted(found, at)
    later_s = _clock(step, plain, example, reads)
    if later_s is not None:
        return _by_clock(later_s, reads.at(CLOCK))
    refusal = refused_by_gradients(step, plain, example)
    if refusal is not None:
        return refusal
    call = _late_call(step, plain, example)
    return None if call is None else _goes_on(call, forward_line(step.model))


def _late_call(step: Step, plain: Plain, example: Sequence[Tensor]) -> int | None:
    """Return the number of a later call that is unlike the first: what counts is nowhere to see."""
    if not _are_few(tensors((step.model, step.own_loss))):
        return None
    most, most_s = (_MORE, _MORE_S) if may_keep(step.model, step.own_loss) else (_MANY, _MANY_S)
    with _going_on(step, Reads()), unheard(), contextlib.suppress(Exception):
        first, is_over = plain.left(example, 0), budget(most_s)
        for call in range(2, most + 1):
            if is_over():
                return None
            if not alike(first, plain.left(example, 0)):
                return call if call > _CALLS[0] + 1 else None  # at once: others name the place
    return None


def _is_moved_by_backward(step: Step, plain: Plain, example: Sequence[Tensor]) -> bool:
    """Whether calls are alike by themselves, and another one is not after a backward."""
    if not _are_few(tensors((step.model, step.own_loss))):
        return False
    with _going_on(step, Reads()), contextlib.suppress(Exception):
        if not alike(*(plain.written(example, 0) for _ in range(2))):
            return False  # what forward leaves is told by others
        first, second, third = (plain.left(example, 0) for _ in range(3))
        return not (alike(first, second) and alike(second, third))
    return False


def _left_by_backward(at: str | None) -> CaptureError:
    return CaptureError(
        "after a backward the same batch, weights, buffers and seed give other numbers: it "
        "leaves something outside (an attribute of a class, a number of the file) that forward or "
        "backward goes by, and a trace would keep what it is now for ever",
        code="BX0160h",
        at=at,
        help=_IN_BUFFER,
    )


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


def _by_clock(later_s: int, at: str | None) -> CaptureError:
    return CaptureError(
        f"forward or loss goes by the clock: {later_s:,} s later the same batch, weights, "
        "buffers and seed give other numbers, and a trace would keep what it is now for ever",
        code="BX0160j",
        at=at,
        help=f"go by the number of steps: {_IN_BUFFER}",
    )


def _watch(step: Step) -> contextlib.AbstractContextManager[Reads]:
    """Watch what is run, where the user's files have a word of the world at all."""
    named = mentions(step.model, step.own_loss, WORDS)
    return watching() if named else contextlib.nullcontext(Reads())


def _decision(step: Step, plain: Plain, example: Sequence[Tensor], reads: Reads) -> Decision | None:
    """Return what forward or loss counts and goes by later, attributes or anything else."""
    if not _are_few(tensors((step.model, step.own_loss))):
        return None  # what calls leave could not be put back
    with (
        _going_on(step, reads) as roots,
        other_weights(step.model),
    ):  # copied later, they are others
        try:
            is_slow = budget(_LOOK_S)
            plain.run(example, 0)
            run = partial(plain.run if is_slow() else plain.left, example, 0)
            return decision(run, partial(plain.left, example, 0), roots)
        except Exception:
            return None  # `trace` says what is wrong with the example


def _clock(step: Step, plain: Plain, example: Sequence[Tensor], reads: Reads) -> int | None:
    """Return after how many seconds forward or loss computes something else."""
    if reads.at(CLOCK) is None or not _are_few(tensors((step.model, step.own_loss))):
        return None
    with _going_on(step, reads) as roots, contextlib.suppress(Exception):
        return decided_by_clock(partial(plain.left, example, 0), roots)
    return None


def _line(
    step: Step, plain: Plain, example: Sequence[Tensor], found: Decision, reads: Reads
) -> str | None:
    """Find the line that moves it."""
    with _going_on(step, reads) as roots:
        return where_changed(
            lambda: plain.run(example, 0), lambda: look(roots).get(found.name, (None, ()))[1]
        )


@contextlib.contextmanager
def _going_on(step: Step, reads: Reads) -> Iterator[tuple[object, ...]]:
    """Let attributes stay as calls leave them, until the end; yield where counters may be."""
    roots = step.model, step.own_loss
    files = map(TextFile, reads.files)
    before, step.watch.keeps = Attributes.of(*roots), True
    held = [t for t in tensors(roots) if type(t) in (Tensor, nn.Parameter) and not t.is_inference()]
    numbers = [(t, t._version, t.detach().clone()) for t in held] if _are_few(held) else []
    try:
        yield (*roots, *files)
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
    least, most = _CALLS
    try:
        first, is_over = plain.written(example, 0), budget(_LOOK_S)
        for call in range(2, most + 1):
            if call > least and is_over():
                return None
            if not alike(first, plain.written(example, 0)):
                return call
    except Exception as error:
        if isinstance(error, CaptureError) and error.family == "BX0160":
            raise  # a buffer is not what it was, and cannot be put back
        return None  # `trace` says what is wrong with the example
    return None


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
