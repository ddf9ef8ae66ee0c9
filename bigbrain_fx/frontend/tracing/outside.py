"""Whether the optimizer, rates or data go by what forward or `batches` leave outside: refused.

    steps of the optimizer ─▶ forward(example), batches() of some steps ─▶ the same steps: alike?

A number of the file that `batches` lowers and step() reads is another one in every process of a
bundle: each draws its own batches, some ahead, and runs its own part of forward. This file runs the
functions of a model file; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.attributes import Attributes
from bigbrain_fx.frontend.tracing.clock import a_day_later
from bigbrain_fx.frontend.tracing.dice import random_state_kept
from bigbrain_fx.frontend.tracing.plain import Plain
from bigbrain_fx.frontend.tracing.reached import Place, codes, holding, tensors
from bigbrain_fx.frontend.tracing.side_effects import may_write, reached
from bigbrain_fx.frontend.tracing.steady import is_costly
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.tracing.trial import (
    Make,
    Numbers,
    Shape,
    apart,
    cut_short,
    dice_kept,
    place_of,
    run_trial,
    shapes_of,
)
from bigbrain_fx.frontend.translation.batch import take_apart

_STEPS = 4
Batches = Callable[[int], Iterable[object]]


def require_optimizer_apart(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    autocast: str | None,
    make: Make,
    batches: Batches | None,
) -> None:
    """Refuse an optimizer that updates otherwise once forward has run, or data were drawn.

    Raises:
        InputError: it does.
    """
    few = cut_short(shapes_of({n: p for n, p in model.named_parameters() if p.requires_grad}))
    before = Attributes.of(model, loss)
    try:
        with dice_kept(), random_state_kept():
            first, again = (run_trial(make, few, list(few)) for _ in range(2))
            if unlike(first, again):
                return  # by itself: `parted` says so
            tomorrow = _run_tomorrow(make, few)
            _use(model, example, loss, autocast, batches)
            after = run_trial(make, few, list(few))
    except Exception:
        return  # the user's own code; others say what is wrong with it
    finally:
        before.put_back()
    if unlike(first, tomorrow):
        raise InputError(
            "optimizer(named_params) goes by the clock: a day after it was made it updates "
            "otherwise, and every process of a bundle has made its own at another time",
            code="BX2127",
            at=place_of(make),
            help="let rates go by the number of steps: lr_scale(step) or scheduler(optimizer) in "
            "the model file",
        )
    if unlike(first, after):
        raise InputError(
            "optimizer(named_params) goes by what forward or batches() leave outside it: after "
            "them it updates otherwise, and every process of a bundle runs a part of them alone",
            code="BX2128",
            at=place_of(make),
            help="let rates go by the number of steps: lr_scale(step) or scheduler(optimizer) in "
            "the model file; what step() needs of a parameter it keeps in self.state[p]",
        )


def require_fed_nothing(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    autocast: str | None,
    readers: Mapping[str, Callable[..., object] | None],
) -> None:
    """Refuse rates and data that go by numbers which forward or loss leave outside the model.

    Args:
        model: the user's, in train mode.
        example: its example batch.
        loss: the user's.
        autocast: as in a model file.
        readers: lr_scale, scheduler and batches of the model file, by what they are called.

    Raises:
        InputError: names the reader, its line, and the number; or the weight that it reads.
    """
    trained = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    known = {name: _numbers(reader) for name, reader in readers.items() if reader is not None}
    before = Attributes.of(model, loss)
    held = {name: {n: place.get() for n, place in places.items()} for name, places in known.items()}
    try:
        _use(model, example, loss, autocast, None)
        moved = {
            name: [n for n, place in places.items() if place.get() != held[name][n]]
            for name, places in known.items()
        }
    except Exception:
        return  # the user's own code; others say what is wrong with it
    finally:
        before.put_back()
    for name in known:
        weights = [trained[id(t)] for t in tensors((readers[name],)) if id(t) in trained]
        if moved[name] or weights:
            raise _fed(name, readers[name], moved[name], weights)


def _numbers(reader: object) -> dict[str, Place]:
    """Return the places of numbers and texts that a function's code reads."""
    inner = [code for f in reached(reader, set()) for code in codes(f.__code__)]
    named = {word for code in inner for word in (*code.co_names, *code.co_freevars)}
    found = holding((reader,), lambda value: isinstance(value, bool | int | float | str))
    return {place.name: place for place in found if _is_read(place.name, named)}


def _is_read(name: str, named: set[str]) -> bool:
    """Whether a place is an entry, a variable, or an attribute that the code has a word of."""
    last = name.rpartition(".")[2]
    return "[" in last or " in " in last or last in named


def _fed(name: str, reader: object, moved: Sequence[str], weights: Sequence[str]) -> InputError:
    what = moved[0] if moved else f"the weight {weights[0]}"
    left = "which forward or loss leaves for it" if moved else "which training changes"
    return InputError(
        f"{name} reads {what}, {left}: every process of a bundle calls {name} for itself, and "
        "runs a part of forward alone",
        code="BX2129",
        at=place_of(cast("Make", reader)),
        help="let rates go by the number of the step, and data by the seed: what is known of the "
        "model only as it trains is computed in forward or loss, of what the batch brings",
    )


def _run_tomorrow(make: Make, few: Mapping[str, Shape]) -> Numbers:
    """Run a trial whose steps come a day after its optimizer was made."""
    with contextlib.ExitStack() as later:

        def make_today(named: list[tuple[str, nn.Parameter]]) -> object:
            made = make(named)
            later.enter_context(a_day_later(make, made))
            return made

        return run_trial(make_today, few, list(few))


def unlike(one: Numbers, other: Numbers) -> bool:
    """Whether two trials left other numbers."""
    return any(bool(apart(one[name], other[name]).any()) for name in one)


def _use(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    autocast: str | None,
    batches: Batches | None,
) -> None:
    """Run forward as training does, and draw some batches where that may write something."""
    taken = take_apart(example)
    inputs = list(taken.sized(taken.rows).values())
    if not is_costly(model, inputs):
        step = Step(model, loss, taken, route(model, example, loss is not None))
        step.watch.keeps = True
        with torch.random.fork_rng(devices=[]):
            Plain(step, model, autocast).run(inputs, 0)
    if batches is not None and may_write(batches):
        list(itertools.islice(batches(0), _STEPS))
