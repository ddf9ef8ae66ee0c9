"""Whether the user's optimizer may be made once per device, and made again where a device died.

It is tried before a bundle is written: three steps on made-up numbers and gradients, once with all
parameters and once with those of each device; with other dice; and with a new optimizer that is
given the state of the first one, as after a death. One that needs all parameters at a time (a
global norm, a name on another device), or a closure, or moves what gets no gradient, is refused.
This file knows the contract for `optimizer` and names of parameters; it knows no graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.optimizer_counts import require_counts_kept
from bigbrain_fx.frontend.tracing.optimizer_layouts import require_order_idle
from bigbrain_fx.frontend.tracing.optimizer_names import require_named
from bigbrain_fx.frontend.tracing.trial import (
    Make,
    Numbers,
    Shape,
    Stir,
    Turn,
    apart,
    as_it_is,
    cut_short,
    dice_kept,
    numbers_of,
    place_of,
    run_trial,
    shapes_of,
    wide_type,
)
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.runtime import StateError

_ALIKE = 1e-9  # of a parameter's largest update, in float64
_OWN = "every device makes an optimizer of its own, and gives it the parameters it has"


@dataclass(frozen=True)
class _Odd:
    """Gradients that are not as made up: see `run_trial`."""

    stir: Stir = as_it_is
    turn: Turn | None = None


_AS_IT_IS = _Odd()


_OF_CODE = (NameError, AttributeError, TypeError, LookupError, ValueError)


def require_parted(
    model: nn.Module,
    make: Make,
    held: Mapping[str, Sequence[str]],
    *,
    here: bool = True,
    by_pieces: bool = False,
) -> str | None:
    """Try an optimizer with all parameters of a model, and with those of each device.

    Args:
        model: whose parameters it is for; of them only names, shapes and types are looked at.
        make: `optimizer` of the model file.
        held: device -> the names of its trained parameters.
        here: whether the devices are of this host's kind; one that fails here may need the others.
        by_pieces: whether it is stepped over a few parameters at a time: see `runtime.stores`.

    Returns:
        Why it could not be tried, if so.

    Raises:
        InputError: it needs a closure, fails, or updates a parameter otherwise.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    everything = {name for names in held.values() for name in names}
    shapes = shapes_of({n: p for n, p in trained.items() if n in everything})
    parts = {device: [n for n in shapes if n in set(names)] for device, names in held.items()}
    parts = {device: names for device, names in parts.items() if names}
    if not parts:
        return None
    with dice_kept():
        try:
            whole = _tried(make, shapes, list(shapes), "")
        except InputError as error:
            if here:
                raise
            return f"the optimizer could not be tried on this host's CPU: {error.what}"
        _require_alone(make, shapes)
        require_counts_kept(make, cut_short(shapes))
        require_named(make, trained)
        require_order_idle(make, trained)
        _require_rest_left(make, shapes, {n: p for n, p in trained.items() if n not in shapes})
        if by_pieces:
            _require_pieces(make, shapes, whole)
        for device, names in parts.items() if len(parts) > 1 else ():
            share = f"device {device}, which has {len(names)} of the {len(shapes)} parameters"
            _require_alike(make, shapes, names, whole, share)
            _require_alike_when_odd(make, cut_short(shapes), names, share)
    return None


def require_runnable(model: nn.Module, make: Make) -> None:
    """Refuse an optimizer whose code fails anywhere, on a few numbers of each parameter.

    A missing package or a kernel that a CPU lacks may be there where the model trains.

    Raises:
        InputError: it raises what its own code is to blame for, or is none.
    """
    shapes = cut_short(shapes_of({n: p for n, p in model.named_parameters() if p.requires_grad}))
    with dice_kept():
        try:
            _tried(make, shapes, list(shapes), "")
        except InputError as error:
            if error.__cause__ is None or isinstance(error.__cause__, _OF_CODE):
                raise


def require_all_stepped(model: nn.Module, make: Make, held: Mapping[str, Sequence[str]]) -> None:
    """Refuse a loss scale where a gradient stays scaled: torch unscales what is stepped.

    Raises:
        InputError: a trained parameter is in no group of the optimizer.
    """
    everything = {name for names in held.values() for name in names}
    trained = {n: p for n, p in model.named_parameters() if n in everything}
    few = {
        n: nn.Parameter(numbers_of(n, shape)) for n, shape in cut_short(shapes_of(trained)).items()
    }
    stepped = {id(p) for group in make(list(few.items())).param_groups for p in group["params"]}
    lacking = [name for name, p in few.items() if id(p) not in stepped]
    if lacking:
        raise InputError(
            f"grad_scaler with {lacking[0]}, which is trained and in no group of the optimizer: "
            "its gradient would stay scaled, and count so in clip_norm",
            code="BX2130",
            at=place_of(make),
            help="freeze it in model(), with requires_grad_(False), or give it to the optimizer "
            "in a group of its own with lr=0.0",
        )


def _require_pieces(make: Make, shapes: Mapping[str, Shape], whole: Numbers) -> None:
    """Refuse one that does something once a step, such as to divide by the norm of all gradients.

    Raises:
        InputError: stepped over a piece of them at a time, it updates otherwise, or it fails.
    """
    found = _by_pieces(make, shapes)
    unlike = [name for name in shapes if apart(found[name], whole[name]).any()]
    if unlike:
        raise _once_a_step(make, f"it updates {unlike[0]} otherwise", code="BX2131")
    few = cut_short(shapes)
    largest = max(few, key=lambda name: math.prod(few[name].size))  # a piece of its own
    for when, odd in _odd({name for name in few if name != largest}).items():
        try:
            want = run_trial(make, few, list(few), stir=odd.stir, turn=odd.turn)
        except Exception:
            continue  # it wants the shapes that it is made for
        found = _by_pieces(make, few, odd)
        unlike = [name for name in few if apart(found[name], want[name]).any()]
        if unlike:
            does = f"it updates {unlike[0]} otherwise where gradients {when}"
            raise _once_a_step(make, does, code="BX2132")


def _by_pieces(make: Make, shapes: Mapping[str, Shape], odd: _Odd = _AS_IT_IS) -> Numbers:
    try:
        return run_trial(make, shapes, list(shapes), by_pieces=True, stir=odd.stir, turn=odd.turn)
    except Exception as error:  # the user's own code, or groups that depend on the piece
        first = (str(error).splitlines() or [""])[0]
        raise _once_a_step(
            make, f"it fails: {type(error).__name__}: {first}", code="BX2133"
        ) from error


def _once_a_step(make: Make, does: str, *, code: str) -> InputError:
    return InputError(
        "optimizer(named_params) does something once a step for all parameters: stepped over a "
        f"few at a time, as --offload state needs it, {does}",
        code=code,
        at=place_of(make),
        help="keep it for each parameter (self.state[p]); clip_norm and grad_scaler in the model "
        "file are for all of them; or leave --offload out",
    )


def _require_alone(make: Make, shapes: Mapping[str, Shape]) -> None:
    """Refuse one whose steps need more than its state: random numbers, or what it keeps elsewhere.

    Raises:
        InputError: another seed, or a new optimizer with the state of the old, updates otherwise.
    """
    few = cut_short(shapes)
    try:
        first, second, thrown = (run_trial(make, few, list(few), seed=seed) for seed in (0, 0, 1))
        renewed = run_trial(make, few, list(few), renewed_at=1)
    except StateError as error:
        raise _keeps(str(error), make, code="BX2134") from error
    except Exception:
        return  # it wants the shapes that it is made for, and has run with those
    if _unlike(first, second):
        raise _keeps(
            "the second one that is made here updates otherwise than the first", make, code="BX2135"
        )
    if _unlike(first, thrown):
        raise InputError(
            "optimizer(named_params) draws random numbers in step(), and every device draws others",
            code="BX2136",
            at=place_of(make),
            help="let the model add the noise: torch.randn_like in forward is drawn by keys, the "
            "same in every run; or leave it out",
        )
    if _unlike(first, renewed):
        raise _keeps("a new one that is given its state goes on otherwise", make, code="BX2137")


def _require_rest_left(
    make: Make, shapes: Mapping[str, Shape], rest: Mapping[str, nn.Parameter]
) -> None:
    """Refuse one that moves a parameter without gradient: no device gives those to its optimizer.

    Raises:
        InputError: it does, or updates the others otherwise beside them.
    """
    if not rest:
        return
    few, idle = cut_short(shapes), frozenset(rest)
    try:
        alone = run_trial(make, few, list(few))
        beside = run_trial(make, few | cut_short(shapes_of(rest)), [*few, *rest], idle=idle)
    except Exception:
        return  # it wants the shapes that it is made for, or fails in plain PyTorch, too
    start = {name: numbers_of(name, shape) for name, shape in cut_short(shapes_of(rest)).items()}
    moved = [name for name in rest if apart(beside[name], start[name]).any()]
    if not moved and not _unlike(alone, beside):
        return
    does = f"moves {moved[0]}, to" if moved else f"looks at {next(iter(rest))}, to"
    raise InputError(
        f"optimizer(named_params) {does} which no gradient flows from the loss: a bundle gives its "
        "optimizers what is trained",
        code="BX2138",
        at=place_of(make),
        help="freeze it in model(), with requires_grad_(False), or take it out of the model; or "
        "pass over parameters whose grad is None in step(), as torch's optimizers do",
    )


def _unlike(one: Numbers, other: Numbers) -> bool:
    return any(apart(one[name], other[name]).any() for name in one)


def _keeps(what: str, make: Make, *, code: str) -> InputError:
    return InputError(
        f"optimizer(named_params) keeps what a process that replaces a dead one would lack: {what}",
        code=code,
        at=place_of(make),
        notes=("what is kept: state[p], for each parameter p, and the numbers of param_groups",),
        help="keep it there: self.state[p]['count'] for a counter, torch.stack(old) for a list of "
        "tensors; of a wrapper round others, in "
        "its __init__: for part in parts: part.state = self.state, and self.param_groups = [g for "
        "part in parts for g in part.param_groups]; for a scheduler define "
        "scheduler(optimizer) in the model file, which returns it; for a GradScaler write "
        "grad_scaler = True there",
    )


def _require_alike(
    make: Make, shapes: Mapping[str, Shape], names: Sequence[str], whole: Numbers, share: str
) -> None:
    found = _tried(make, shapes, names, share)
    unlike = [name for name in names if apart(found[name], whole[name]).any()]
    wrong = _largest(make, shapes, names, unlike) if unlike else None
    if wrong is None:
        return
    name, error = wrong
    more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
    raise InputError(
        f"optimizer(named_params) looks at more than one parameter at a time: on {share}, it "
        f"updates {name}{more} otherwise, by {error:.1e} of its update",
        code="BX2139",
        at=place_of(make),
        notes=(_OWN,),
        help="update each parameter by its own gradient alone, as torch.optim.AdamW does, and "
        "choose by names, not by places in the list, which each device has a part of "
        "(`clip_norm = 1.0` in the model file clips by the norm over all devices), "
        "or let one device have all of them: leave --zero out, or split over one device",
    )


def _require_alike_when_odd(
    make: Make, few: Mapping[str, Shape], names: Sequence[str], share: str
) -> None:
    """Refuse one that looks at others' gradients when they are huge, tiny, steady or not finite.

    Raises:
        InputError: it leaves a step out, say, and on the other devices it would not.
    """
    for when, odd in _odd(frozenset(names)).items():
        try:
            whole = run_trial(make, few, list(few), stir=odd.stir, turn=odd.turn)
            found = run_trial(make, few, names, stir=odd.stir, turn=odd.turn)
        except Exception:
            continue  # it wants the shapes that it is made for
        unlike = [name for name in names if apart(found[name], whole[name]).any()]
        wrong = _largest(make, few, names, unlike, odd) if unlike else None
        if wrong is not None:
            raise InputError(
                f"optimizer(named_params) looks at more than one parameter where gradients {when}: "
                f"on {share}, it updates {wrong[0]} otherwise then",
                code="BX2140",
                at=place_of(make),
                notes=(_OWN,),
                help=_OF_ALL if odd.turn is None else _OF_GROUP,
            )


_OF_ALL = (
    "let the model file say it for all devices: clip_norm = 1.0 clips by the norm of all "
    "gradients, and grad_scaler = {'init_scale': 1.0, 'growth_interval': 10**9} leaves out each "
    "step where one is not finite; or split over one device"
)
_OF_GROUP = (
    "what is estimated over a group (a rate from all gradients, as Prodigy and D-Adaptation do) is "
    "estimated for each parameter: [{'params': [p]} for _, p in named_params] gives each a group "
    "of its own; or give a rate, as torch.optim.AdamW takes one; or split over one device"
)


def _odd(own: Collection[str]) -> dict[str, _Odd]:
    """Return gradients for which an optimizer may leave a step out, and of whose: some are ours.

    Ours are tiny beside large ones of others: whatever a limit is, it lies between. Steady ones are
    what a rate is raised by, where an optimizer finds it itself.
    """
    return {
        "are huge": _Odd(lambda _, gradient: gradient * 1e6),
        "are tiny": _Odd(lambda _, gradient: gradient * 1e-9),
        "of the others are huge": _Odd(lambda name, g: g * (1e-6 if name in own else 1e6)),
        "of the others are tiny": _Odd(lambda name, g: g * (1e6 if name in own else 1e-9)),
        "of the others are not finite": _Odd(
            lambda name, g: g * (1e-6 if name in own else math.inf)
        ),
        "stay the same from step to step": _Odd(turn=lambda _name, _step: 1.0),
        "of the others turn round at each step": _Odd(
            turn=lambda name, step: 1.0 if name in own else 1e3 * (-1) ** step
        ),
        "turn round at each step, and those of the others do not": _Odd(
            turn=lambda name, step: (-1.0) ** step if name in own else 1e3
        ),
    }


def _largest(
    make: Make,
    shapes: Mapping[str, Shape],
    names: Sequence[str],
    unlike: Sequence[str],
    odd: _Odd = _AS_IT_IS,
) -> tuple[str, float] | None:
    """Let float64 decide whether it was rounding; return what differs most."""
    wide = {name: Shape(shape.size, wide_type(shape.dtype)) for name, shape in shapes.items()}
    whole, part = (
        run_trial(make, wide, some, stir=odd.stir, turn=odd.turn) for some in (list(wide), names)
    )
    errors = {
        name: _error(part[name], whole[name], numbers_of(name, wide[name])) for name in unlike
    }
    name = max(errors, key=lambda each: errors[each])
    return (name, errors[name]) if errors[name] > _ALIKE else None


def _error(found: Tensor, want: Tensor, start: Tensor) -> float:
    update, error = (float(apart(want, other).abs().max()) for other in (start, found))
    if not error:
        return 0.0
    return error / update if update and math.isfinite(error) else math.inf


# --------------------------------------------------------------------------- one trial


def _tried(make: Make, shapes: Mapping[str, Shape], names: Sequence[str], share: str) -> Numbers:
    """Run a trial; say what the user's code raises there.

    Raises:
        InputError: it raises, needs a closure, or holds other parameters.
    """
    try:
        return run_trial(make, shapes, names)
    except InputError:
        raise
    except Exception as error:  # the user's own code
        first = (str(error).splitlines() or [""])[0]
        what = f"{type(error).__name__}: {first}"
        at = where(error) or place_of(make)
        if share:
            raise _fails_apart(what, share, at) from error
        raise InputError(
            f"optimizer(named_params), or a step of it, fails: {what}",
            code="BX2141",
            at=at,
            notes=(
                "it was given parameters of the model's names, shapes and types, and gradients",
            ),
            help="let optimizer(list(model.named_parameters())) run in plain PyTorch first; choose "
            "by names and shapes, and give an optimizer whose step() needs nothing but gradients, "
            "such as torch.optim.AdamW(named_params)",
        ) from error


def _fails_apart(what: str, share: str, at: str) -> InputError:
    return InputError(
        f"optimizer(named_params) fails on {share}: {what}",
        code="BX2142",
        at=at,
        notes=(_OWN,),
        help="choose by the names it is given, in groups that may be empty: {'params': [p for n, p "
        "in named_params if n == 'head.weight'], 'lr': 0.1}; freeze what is not to be trained in "
        "model(), with requires_grad_(False); or split over one device",
    )
