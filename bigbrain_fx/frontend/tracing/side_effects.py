"""Side effects of `batches`, `lr_scale` and the optimizer on what forward computes: refused.

    forward(example) ─▶ batches(), lr_scale(), step() some times ─▶ forward(example): the same?

A dropout rate that `batches` lowers, or a number of the file that it writes and forward reads,
would be a constant of the trace; an `lr_scale` that counts its calls begins again where a device is
replaced. Data are drawn only where the function's code may write something: they may be far away.
This file knows the functions of a model file and runs steps; it knows no graphs.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.attributes import Attributes
from bigbrain_fx.frontend.tracing.budget import budget
from bigbrain_fx.frontend.tracing.clock import a_day_later
from bigbrain_fx.frontend.tracing.counters import decision
from bigbrain_fx.frontend.tracing.dice import random_state_kept
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike
from bigbrain_fx.frontend.tracing.reached import codes, known
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.tracing.trial import (
    Make,
    cut_short,
    numbers_of,
    run_trial,
    shapes_of,
)
from bigbrain_fx.frontend.translation.batch import take_apart
from bigbrain_fx.frontend.translation.sources import is_users

_STEPS = 4
_LOOK_S = 0.2  # what takes longer is not tried for what it decides much later
_MUTABLE = (dict, list, set, bytearray, Tensor, nn.Module)
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_BY_NAME = frozenset({"globals", "vars", "setattr", "exec", "modules", "import_module"})

LrScale = Callable[[int], float]
Batches = Callable[[int], Iterable[object]]


def require_no_side_effects(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    autocast: str | None,
    *,
    batches: Batches | None = None,
    lr_scale: LrScale | None = None,
    optimizer: Make | None = None,
    scheduler: Make | None = None,
) -> None:
    """Refuse what of a model file changes, beside the weights, what forward or loss computes.

    Args:
        model: the user's, in train mode.
        example: its example batch.
        loss: the user's.
        autocast: as in a model file.
        batches: of the model file; what it raises is of no interest here.
        lr_scale: of the model file, likewise.
        optimizer: likewise; a few steps are tried on made-up gradients.
        scheduler: likewise.

    Raises:
        InputError: names the function and what it changed, or the steps of `lr_scale`.
    """
    before = Attributes.of(model, loss)
    if lr_scale is not None:
        _require_by_number(lr_scale)
        before.put_back()
    doings: dict[str, tuple[Callable[..., object] | None, Callable[[], object]]] = {
        "batches()": (batches, lambda: batches and _drawn(batches)),
        "lr_scale()": (lr_scale, lambda: lr_scale and [lr_scale(step) for step in range(_STEPS)]),
        "a step of optimizer()": (optimizer, lambda: optimizer and _stepped(model, optimizer)),
        "a step of scheduler()": (
            scheduler,
            lambda: scheduler and _scheduled(model, optimizer or torch.optim.AdamW, scheduler),
        ),
    }
    for name, (function, do) in doings.items():
        if function is not None and may_write(function):
            _require_same(model, example, loss, autocast, name, function, do)


def _drawn(batches: Batches) -> list[object]:
    return list(itertools.islice(batches(0), _STEPS))


def _stepped(model: nn.Module, make: Make) -> object:
    few = cut_short(shapes_of({n: p for n, p in model.named_parameters() if p.requires_grad}))
    return run_trial(make, few, list(few))


def _scheduled(model: nn.Module, make: Make, scheduler: Make) -> object:
    few = cut_short(shapes_of({n: p for n, p in model.named_parameters() if p.requires_grad}))
    made = scheduler(make([(n, nn.Parameter(numbers_of(n, shape))) for n, shape in few.items()]))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Detected call of `lr_scheduler"
        )  # no update is made here
        for _ in range(_STEPS):
            made.step()
    return made


def _require_by_number(lr_scale: LrScale) -> None:
    """Refuse an `lr_scale` that goes by more than the number of the step."""
    asked: dict[str, list[float]] = {}
    with contextlib.suppress(Exception), _dice_kept():  # whoever runs the bundle is told
        for when in ("first", "when it is asked again"):
            asked[when] = [float(lr_scale(step)) for step in range(_STEPS)]
        with a_day_later(lr_scale):
            asked["a day later"] = [float(lr_scale(step)) for step in range(_STEPS)]
    first = asked.pop("first", [])
    for when, step in itertools.product(asked, range(len(first))):
        one, other = first[step], asked[when][step]
        if one != other:
            raise InputError(
                f"lr_scale({step}) is {one:.6g} first and {other:.6g} {when}: "
                "every device asks for itself, and one that replaces a dead one begins anew",
                code="BX2151",
                at=_place(lr_scale),
                help="let it go by its argument alone: def lr_scale(step): return min(1.0, (step + "
                "1) / 100)",
            )


def _require_same(
    model: nn.Module,
    example: object,
    loss: Loss | None,
    autocast: str | None,
    name: str,
    function: Callable[..., object],
    do: Callable[[], object],
) -> None:
    """Refuse a function after which the example has other numbers.

    Raises:
        InputError: names what it changed.
    """
    numbers = _numbers(model, example, loss, autocast)
    before = Attributes.of(model, loss)

    def done() -> None:
        with contextlib.suppress(Exception), _dice_kept():
            do()

    def done_first() -> Numbers:
        done()
        return numbers()

    try:
        first, again = numbers(), numbers()
        before.put_back()
        is_slow = budget(_LOOK_S)
        done()
        is_quick = not is_slow()
        moved = before.moved(Attributes.of(model, loss))
        same = not alike(first, again) or alike(first, numbers())
        later = decision(done, done_first, (model, loss)) if same and is_quick else None
    except Exception:
        return  # `trace` says what is wrong with the example
    finally:
        before.put_back()
    if not same or later is not None:
        raise _changes(name, function, moved if later is None else [later.name])


def _numbers(
    model: nn.Module, example: object, loss: Loss | None, autocast: str | None
) -> Callable[[], Numbers]:
    """Return what computes the example's results and gradients."""
    taken = take_apart(example)
    step = Step(model, loss, taken, route(model, example, loss is not None))
    plain = Plain(step, model, autocast)
    return lambda: plain.gradients(list(taken.sized(taken.rows).values()), 0)


class Copied:
    """A module that devices have copies of: what its owner changes in it later does not reach them.

    Args:
        model: the caller's, as it was copied.
        example: the batch it was captured with.
        loss: likewise.
        autocast: as it was captured.
    """

    def __init__(
        self, model: nn.Module, example: object, loss: Loss | None, autocast: str | None
    ) -> None:
        self.model = model
        self.loss = loss
        self.numbers = _numbers(model, example, loss, autocast)
        self.before = Attributes.of(model, loss)
        self.let_be: set[str] = set()  # what moved, and counts nothing

    def require(self) -> None:
        """Refuse to go on where the module is another one: frozen, with another dropout rate.

        Raises:
            InputError: names what was changed.
        """
        now = Attributes.of(self.model, self.loss, numbers=False)
        moved = [n for n in self.before.moved(now) if _is_within(n, now) and n not in self.let_be]
        if moved and self._counts(moved):
            name = moved[0]
            raise InputError(
                f"the module's {name} has changed since the session began (it was "
                f"{self.before.said(name)}, it is {now.said(name)}), and devices train what it was",
                code="BX2152",
                help="change the module first, and make a session of it then; rates change by "
                "lr_scale, numbers of each step are entries of the batch",
            )
        self.let_be.update(moved)

    def _counts(self, moved: list[str]) -> bool:
        now = Attributes.of(self.model, self.loss)
        if any(n.endswith(".requires_grad") or now.is_part(n) for n in moved):
            return True
        try:
            found = self.numbers()
            self.before.put_back()
            return not alike(self.numbers(), found)
        except Exception:  # the caller's own code
            return False
        finally:
            now.put_back()


def _is_within(name: str, now: Attributes) -> bool:
    """Whether an attribute is a module's, of the model, and not a file's or a class's."""
    return name.removesuffix(".requires_grad").rpartition(".")[0] in now.paths


@contextlib.contextmanager
def _dice_kept() -> Iterator[None]:
    with random_state_kept(), torch.random.fork_rng(devices=[]):
        yield


def _changes(name: str, function: Callable[..., object], moved: list[str]) -> InputError:
    what = f"changes {', '.join(moved[:3])}" if moved else "changes something"
    return InputError(
        f"{name} {what}, and what forward computes depends on it: a trace would keep what it is "
        "now for ever",
        code="BX2153",
        at=_place(function),
        help=_BY_RATES if _freezes(moved) else _BY_THE_BATCH,
    )


def _freezes(moved: list[str]) -> bool:
    return bool(moved) and all(name.endswith(".requires_grad") for name in moved)


_BY_RATES = (
    "freeze by rates: give those parameters a group of their own in optimizer(named_params), "
    "picked by name, and let scheduler(optimizer) return torch.optim.lr_scheduler.LambdaLR("
    "optimizer, [lambda step: float(step >= 200), lambda step: 1.0]), a factor for each group; "
    "momentum and clipping still count their gradients meanwhile"
)
_BY_THE_BATCH = (
    "let the batch bring it: an entry of batches() with a number for each row, torch.full((rows, "
    "1), value), that forward reads; for a dropout rate, forward draws the mask: h * "
    "(torch.rand_like(h) < keep) / keep"
)


def _place(function: Callable[..., object]) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else None


# --------------------------------------------------------------------------- who may write


def may_write(function: object) -> bool:
    """Whether a function's code, or that of the user's own that it calls, may write outside it."""
    return any(_writes(inner) for inner in reached(function, set()))


def reached(value: object, seen: set[int]) -> Iterator[types.FunctionType]:
    """Yield a function and the user's functions and methods whose names it, or they, have."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        yield value
        for held in known(value).values():
            yield from reached(held, seen)
    elif isinstance(value, type) and is_users(_file(value)):
        for inner in vars(value).values():
            yield from reached(inner, seen)
    elif not isinstance(value, type) and is_users(_file(type(value))):
        yield from reached(type(value), seen)
    elif isinstance(inner := getattr(value, "func", None), types.FunctionType):  # partial
        yield from reached(inner, seen)


def _writes(function: types.FunctionType) -> bool:
    stores = any(i.opname in _WRITES for c in codes(function.__code__) for i in dis.Bytecode(c))
    named = any(_BY_NAME & {*c.co_names} for c in codes(function.__code__))
    held = known(function)
    cells = any(
        i.opname == "STORE_DEREF" and i.argval in function.__code__.co_freevars
        for c in codes(function.__code__)
        for i in dis.Bytecode(c)
    )
    return stores or named or cells or any(map(_may_change, held.values()))


def _may_change(value: object) -> bool:
    if isinstance(value, _MUTABLE):
        return True
    kind = value if isinstance(value, type) else type(value)
    return is_users(_file(kind)) and not isinstance(value, types.FunctionType)


def _file(kind: type) -> str:
    return str(getattr(inspect.getmodule(kind), "__file__", None) or "")
