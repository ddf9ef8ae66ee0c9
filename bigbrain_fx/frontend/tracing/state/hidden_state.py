"""State that calls of forward leave where no state dict finds it, and that later calls go by.

    a fork: forward(x), forward(x), ... under one seed ─▶ the same numbers?
    moved values ─▶ as 50, 1000, 1000000 calls later ─▶ forward(x): the same numbers?

A cache that changes nothing is let be; a hidden state or a counter would be a constant of the
trace. A rehearsal finds state that acts in the first steps, at any size. This module finds state
that acts later, and state of a bundle for inference, which has no rehearsal. The fork keeps all
that calls leave.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from bigbrain_fx.errors import BigBrainError, CaptureError, from_fields
from bigbrain_fx.frontend.forked import apart
from bigbrain_fx.frontend.tracing.blank import is_blank
from bigbrain_fx.frontend.tracing.check import CHECK_FLOPS
from bigbrain_fx.frontend.tracing.dataflow import FakePlain
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain
from bigbrain_fx.frontend.tracing.state.attributes import OF_TORCH, Attributes
from bigbrain_fx.frontend.tracing.state.counters import Decision, decision, numbers_of
from bigbrain_fx.frontend.tracing.state.module_state import (
    begun_anew,
    goes_on,
    is_within,
    moving_modules,
)
from bigbrain_fx.frontend.tracing.state.python_rng import where_changed
from bigbrain_fx.frontend.tracing.step import Loss, Route, Step
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.sources import forward_line

_STRIDED = (Tensor, nn.Parameter)
_Held = list[tuple[Tensor, Tensor]]  # tensors, and their numbers
_MOST = 2**28  # bytes of weights, for which a few calls take long
_REMEDY = (
    "put it, with the lines that go by it, into a module of its own, which forward calls once: "
    "that is opaque, and its attributes are recorded. Or hold it in a buffer, "
    "self.register_buffer('calls', torch.zeros(())) in __init__, write into it in place "
    "(self.calls += 1), and read it as a tensor (torch.clamp(self.calls / 100, max=1.0), or "
    "torch.where(self.calls % 100 == 0, new, old) for if); or let the batch bring it: an entry of "
    "batches() with a number for each row. Parameters and modules are made in __init__; what only "
    "a first call changes (a cache for longer texts) is there when model() has run the model once; "
    "a loss that is a module with buffers is held by the model, whose forward returns the loss"
)


def modules_with_state(
    model: nn.Module,
    loss: Loss | None,
    batch: Batch,
    how: Route,
    autocast: str | None,
    opaque: Collection[str] | None = None,
) -> tuple[str, ...] | None:
    """Return the modules with calls that depend on attributes of earlier calls; None: too costly.

    Args:
        model: in the mode that it is captured in.
        loss: the user's.
        batch: the example, taken apart.
        how: it reaches forward.
        autocast: as captured.
        opaque: paths of modules that may have state, as may modules within; None: any.

    Raises:
        CaptureError: calls give different numbers for the same batch, now or later, and other code
            than such modules is a cause.
    """
    example = list(batch.sized(batch.rows).values())
    step = Step(model, loss, batch, how)
    step.watch.keeps = True
    if is_costly(model, example):
        if not any(parameter.is_meta for parameter in model.parameters()):  # of an estimate
            names = tuple(entry.name for entry in batch.entries)
            _require_no_counter(step, FakePlain(step, model, autocast, names, loss), example)
        return None
    plain = Plain(step, model, autocast)
    if _leaves_nothing(step, plain, example):
        return ()
    found = apart(partial(_refused, step, plain, example)) or {}
    if "error" not in found:
        return ()
    kept = _in_modules(step, plain, example) if opaque is None or opaque else None
    paths = tuple(json.loads(kept["paths"])) if kept else ()
    if not paths or not (opaque is None or all(is_within(path, opaque) for path in paths)):
        raise from_fields(json.loads(found["error"]))
    return paths


def _require_no_counter(step: Step, plain: FakePlain, example: Sequence[Tensor]) -> None:
    """Refuse counters by which a large model goes later; what acts at once a rehearsal shows.

    Raises:
        CaptureError: with other counts it calls other ops.
    """
    if not _leaves_nothing(step, plain, example):
        found = apart(partial(_goes_by_a_counter, step, plain, example)) or {}
        if "error" in found:
            raise from_fields(json.loads(found["error"]))


def _goes_by_a_counter(
    step: Step, plain: FakePlain, example: Sequence[Tensor]
) -> Mapping[str, str]:
    """Return the refusal as "error"; it runs in a fork. The first run leaves what it caches."""
    with suppress(Exception):  # the user's own code, which may read numbers
        plain.left(example, 0)
        plain.known.clear()
        run = partial(plain.left, example, 0)
        found = decision(run, partial(numbers_of, step.model, step.own_loss))
        if found is not None and found.runs:
            return {"error": json.dumps(_refusal(step, plain, example, found).fields)}
    return {}


def _in_modules(step: Step, plain: Plain, example: Sequence[Tensor]) -> Mapping[str, str] | None:
    """Return as "paths" the modules with all state of calls; nothing where other code has some.

    Each trial has a fork of its own: a counter of the first calls begins anew there.
    """
    found = apart(partial(_moving, step, plain, example))
    if not found:
        return None
    paths: list[str] = json.loads(found["paths"])
    trials = [partial(each, step, plain, example, paths) for each in (_goes_on, _begins_anew)]
    return found if all(apart(trial) for trial in trials) else None


def _moving(step: Step, plain: Plain, example: Sequence[Tensor]) -> Mapping[str, str]:
    """Return the modules with attributes that move as the model runs."""
    with suppress(Exception):  # the user's own code, in an order of its own
        paths = moving_modules(step.model, partial(_left, plain, example, _held(step.model)))
        return {"paths": json.dumps(paths)} if paths else {}
    return {}


def _goes_on(
    step: Step, plain: Plain, example: Sequence[Tensor], paths: Sequence[str]
) -> Mapping[str, str]:
    """Report whether runs go on equally after the modules' attributes are saved and restored."""
    is_data = goes_on(step.model, paths, partial(_left, plain, example, _held(step.model)))
    return {"is_data": "yes"} if is_data else {}


def _begins_anew(
    step: Step, plain: Plain, example: Sequence[Tensor], paths: Sequence[str]
) -> Mapping[str, str]:
    """Report whether no counter decides while the modules' calls begin as the first one did."""
    run = partial(_left, plain, example, _held(step.model))
    with suppress(Exception), begun_anew(step.model, paths) as anew:  # as `NotOpaqueError`
        look = partial(numbers_of, step.model, step.own_loss)
        return {} if decision(partial(anew, run), look) else {"is_steady": "yes"}
    return {}


def _leaves_nothing(step: Step, plain: Plain, example: Sequence[Tensor]) -> bool:
    """Whether a call changes no state that is looked at: later calls depend on none then."""
    roots = step.model, step.own_loss
    before, seen = Attributes.of(*roots), _seen(roots)
    try:
        plain.run(example, 0)
    except Exception as error:
        if isinstance(error, CaptureError) and error.family == "BX0160":
            raise  # a buffer is not what it was, and cannot be put back
        return True  # `trace` says what is wrong with the example
    try:
        now = Attributes.of(*roots, numbers=False)
        return not before.moved(now) and seen == _seen(roots)
    finally:
        before.put_back()


def _seen(roots: tuple[nn.Module, object]) -> object:
    """Return the counters' numbers, and the written tensors; buffers are put back anyway."""
    model, loss = roots
    of_loss = loss.buffers() if isinstance(loss, nn.Module) else ()
    held = [t for t in (*_beside(model), *of_loss) if not t.is_inference()]
    return _counts(roots), [t._version for t in held]


def _counts(roots: tuple[nn.Module, object]) -> Mapping[str, object]:
    return {name: number for name, (_, number) in numbers_of(*roots).items()}


def _refused(step: Step, plain: Plain, example: Sequence[Tensor]) -> Mapping[str, str]:
    """Return the refusal of state as "error"; it runs in a fork."""
    trained = [p for p in step.model.parameters() if p.requires_grad]
    _move(trained)  # what calls copy of the weights is to be unlike what they have copied before
    before = [p.detach().clone() for p in trained]
    roots = step.model, step.own_loss
    try:
        run = partial(_left, plain, example, _held(step.model))
        found = decision(run, partial(numbers_of, *roots))
        if found is None or not all(map(torch.equal, trained, before)):
            return {}  # `objective` refuses writes into weights
        error: BigBrainError = _refusal(step, plain, example, found)
    except CaptureError as refused:
        error = refused
    except Exception:
        return {}  # `trace` says what is wrong with the example
    of_state = error.family == "BX0160"  # or a buffer is not what it was, and cannot be put back
    return {"error": json.dumps(error.fields)} if of_state else {}


def _held(model: nn.Module) -> _Held:
    """Return the tensors that a trace finds, such as a teacher in a list, and their numbers now.

    Writes of calls into them are the graph's state as a buffer is, and no hidden one.
    """
    held = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
    held = [t for t in (*held, *_beside(model)) if type(t) in _STRIDED and not t.is_inference()]
    return [(t, t.detach().clone()) for t in held] if sum(t.nbytes for t in held) <= _MOST else []


def _beside(model: nn.Module) -> list[Tensor]:
    """Return the tensors in plain attributes, and tensors of modules in plain attributes."""
    kept = (vars(part) for part in model.modules())
    values = [v for own in kept for key, v in own.items() if key not in OF_TORCH]
    leaves = tree_leaves(values)
    inner = (t for v in leaves if isinstance(v, nn.Module) for t in (*v.parameters(), *v.buffers()))
    return [*(v for v in leaves if isinstance(v, Tensor)), *inner]


def _left(plain: Plain, example: Sequence[Tensor], held: _Held) -> Numbers:
    """Return the state after a call, from the same numbers in all tensors of a trace."""
    with torch.no_grad():
        for tensor, numbers in held:
            if not torch.equal(tensor, numbers):
                tensor.copy_(numbers)
    return plain.left(example, 0)


def _move(trained: Sequence[nn.Parameter]) -> None:
    """Move each trained weight a little in a direction of its own, as training does."""
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trained:
            noise = torch.randn(p.shape, generator=dice).to(p.dtype)
            p.add_(noise, alpha=0.05 * float(p.abs().mean().nan_to_num()) + 0.01)


def _refusal(step: Step, plain: Plain, example: Sequence[Tensor], found: Decision) -> CaptureError:
    at = _line(step, plain, example, found) or forward_line(step.model)
    if found.runs < 1:
        named = f" (it moves {found.name})" if found.name else ""
        return CaptureError(
            "a later call of forward gives other numbers than the first, with the same batch, "
            f"buffers and seed: something in no state dict goes on from call to call{named}, and a "
            "trace would keep what it is now for ever",
            code="BX0160g",
            at=at,
            help=_REMEDY,
        )
    return CaptureError(
        f"forward leaves {found.name} for the next call where no state dict finds it, and "
        f"{found.runs} calls later the same batch, weights, buffers and seed give other numbers: a "
        "trace would keep what it is now for ever",
        code="BX0160i",
        at=at,
        help=_REMEDY,
    )


def _line(step: Step, plain: Plain, example: Sequence[Tensor], found: Decision) -> str | None:
    """Find the line that writes the counter that decides; for a decision at once, any write."""
    roots = step.model, step.own_loss

    def seen() -> object:
        if found.runs:
            return _counts(roots).get(found.name)
        return Attributes.of(*roots, numbers=False).marks, _seen(roots)

    place = where_changed(lambda: plain.run(example, 0), seen)
    return place.at if place else None


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
