"""A trial of the optimizer and its scheduler, once a device and again after a device died.

    with all parameters = with each device's own = a new one that has the state of the old

A rehearsal runs the real optimizer on the real bundle for three steps. This trial covers cases that
three steps do not show, on a few made-up numbers of each parameter. The cases are unusual
gradients, a replaced process, and counters. This file knows the contracts of both; it knows no
graph.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Shard
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.executor.tensor_parallel import taken
from bigbrain_fx.frontend.tracing.optimizers.as_data import is_torchs_own
from bigbrain_fx.frontend.tracing.optimizers.refusals import (
    CLIP_OR_SCALE,
    COUNTS,
    DRAWS,
    FAILS,
    FAILS_ON_PART,
    GROUP_FOR_EACH,
    KEEPS,
    LOOKS_AT_MORE_NUMBERS,
    NO_SCHEDULER,
    SCHEDULER_FAILS,
    SCHEDULER_NEEDS_NUMBER,
    TOGETHER,
    TOGETHER_WHERE,
)
from bigbrain_fx.frontend.tracing.optimizers.trial import (
    ALIKE,
    ODD,
    USUAL,
    Gradients,
    Make,
    Numbers,
    Shape,
    Trial,
    cut_short,
    dice_kept,
    in_float64,
    needed_arguments,
    numbers_of,
    place_of,
    run_trial,
    shapes_of,
    unlike,
    worst,
)
from bigbrain_fx.frontend.tracing.state.counters import Counter, moves, moving, numbers_in, put
from bigbrain_fx.frontend.translation.sources import where
from bigbrain_fx.runtime import StateError

Shapes = Mapping[str, Shape]
_SCHEDULER_STEPS = 3
_KEPT = ("state", "param_groups", "defaults")
_OF_CODE = (NameError, AttributeError, TypeError, LookupError, ValueError)


def require_made_per_device(
    model: nn.Module,
    make: Make | None,
    scheduler: Make | None,
    held: Mapping[str, Sequence[str]],
    *,
    here: bool,
) -> str | None:
    """Require that an optimizer and its scheduler can be built once a device.

    Args:
        model: with the parameters.
        make: None: AdamW with its defaults.
        scheduler: None: there is none.
        held: device -> the names of its trained parameters.
        here: whether the devices are of this host's kind.

    Returns:
        The reason why no trial was possible, if any.

    Raises:
        InputError: they cannot be built so.
    """
    note = None if make is None else require_per_device(model, make, held, here=here)
    if scheduler is not None and not note:
        require_scheduler(_trained(model, held), make, scheduler)
    return note


def require_per_device(
    model: nn.Module,
    make: Make,
    held: Mapping[str, Sequence[str]],
    *,
    here: bool = True,
) -> str | None:
    """Try an optimizer with all parameters of a model, and with each device's own.

    Args:
        model: with the parameters; only names, shapes and types are used.
        make: `optimizer` of the model file.
        held: device -> the names of its trained parameters.
        here: whether the devices are of this host's kind; an optimizer that fails here may need
            another.

    Returns:
        The reason why no trial was possible, if any.

    Raises:
        InputError: it needs a closure, fails, or updates a parameter otherwise.
    """
    shapes = shapes_of(_trained(model, held))
    parts = {device: [n for n in shapes if n in set(names)] for device, names in held.items()}
    parts = {device: names for device, names in parts.items() if names}
    if not parts:
        return None
    few = cut_short(shapes)
    with dice_kept():
        if is_torchs_own(make, few, parts.values()):
            shapes, parts = few, {}  # nothing of it is to be found out but whether it runs
        try:
            _require_run(make, shapes)
        except InputError as error:
            if here:
                raise
            return f"the optimizer could not be tried on this host's CPU: {error.what}"
        if parts and _runs(make, few):  # else it wants the shapes that it is made for
            _require_all(make, few, parts if len(parts) > 1 else {})
    return None


def _trained(model: nn.Module, held: Mapping[str, Sequence[str]]) -> dict[str, nn.Parameter]:
    everything = {name for names in held.values() for name in names}
    return {n: p for n, p in model.named_parameters() if p.requires_grad and n in everything}


def _require_all(make: Make, few: Shapes, parts: Mapping[str, Sequence[str]]) -> None:
    _require_renewable(make, few)
    _require_counts_kept(make, few)
    for device, names in parts.items():
        share = f"device {device}, which has {len(names)} of the {len(few)} parameters"
        _require_alike(make, few, names, share)


def require_runnable(model: nn.Module, make: Make) -> None:
    """Refuse an optimizer that would fail on any host, on a few numbers of each parameter.

    A missing package or a kernel that a CPU lacks may be there where the model trains.

    Raises:
        InputError: its own code is at fault, or it is no optimizer.
    """
    shapes = cut_short(shapes_of({n: p for n, p in model.named_parameters() if p.requires_grad}))
    with dice_kept():
        try:
            _require_run(make, shapes)
        except InputError as error:
            if error.__cause__ is None or isinstance(error.__cause__, _OF_CODE):
                raise


def _runs(make: Make, shapes: Shapes) -> bool:
    try:
        run_trial(make, shapes, list(shapes))
    except Exception:  # the user's own code
        return False
    return True


def _require_run(make: Make, shapes: Shapes) -> None:
    """Run a trial of all parameters; report an error of the user's code."""
    try:
        run_trial(make, shapes, list(shapes))
    except InputError:
        raise
    except Exception as error:  # the user's own code
        raise FAILS.error(where(error) or place_of(make), error=_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# --------------------------------------------------------------------------- a replaced process


def _require_renewable(make: Make, few: Shapes) -> None:
    """Refuse an optimizer that needs more than its state: random numbers, or other attributes.

    Raises:
        InputError: another seed, or a new optimizer with the old one's state, has other updates.
    """
    at, names = place_of(make), list(few)
    try:
        first, second, thrown = (run_trial(make, few, names, seed=seed) for seed in (0, 0, 1))
        renewed = run_trial(make, few, names, renewed_at=1)
    except StateError as error:
        raise KEEPS.error(at, what=error) from error
    if unlike(first, second):
        raise KEEPS.error(at, what="the second one that is made here updates otherwise")
    if unlike(first, thrown):
        raise DRAWS.error(at)
    if unlike(first, renewed):
        raise KEEPS.error(at, what="a new one that is given its state goes on otherwise")


def _require_counts_kept(make: Make, few: Shapes) -> None:
    """Refuse an optimizer with other updates after more steps than its state has counted.

    Lookahead counts to its k in an attribute, a warm-up ends after a thousand steps.

    Raises:
        InputError: names the counter.
    """
    found = _counted(Trial(make, few, list(few)), Trial(make, few, list(few)))
    if found is not None:
        raise COUNTS.error(place_of(make), name=found[0].name, runs=found[1])


def _counted(one: Trial, other: Trial) -> tuple[Counter, int] | None:
    """Return the counter that makes two trials differ, and the number of steps until then."""
    looks = []
    for _ in range(3):  # what begins to count is there after the first
        one.step()
        other.step()
        looks.append(numbers_in(other.made, _KEPT))
    counters = moving(*looks)
    for runs, change, times in moves() if counters else ():
        put(numbers_in(other.made, _KEPT), [(each, change(each)) for each in counters])
        for _ in range(times):
            one.step()
            other.step()
            if unlike(one.numbers, other.numbers):
                return counters[0], runs
    return None


# --------------------------------------------------------------------------- a part of all


def _wanted(
    make: Make, shapes: Shapes, ours: Collection[str]
) -> Iterator[tuple[Gradients, Numbers]]:
    """Yield gradients, and the updates of an optimizer with all parameters, where it runs."""
    for given in (USUAL, *ODD):
        with suppress(Exception):  # the user's own code: it divides by what is too small, say
            found = run_trial(make, shapes, list(shapes), given, ours)
            yield given, found


def _require_alike(make: Make, few: Shapes, names: Sequence[str], share: str) -> None:
    """Refuse one that a device's parameters are not enough for; in float64, not to meet rounding.

    Raises:
        InputError: with gradients as usual, or odd ones, it fails or updates otherwise there.
    """
    wide = in_float64(few)
    start = {name: numbers_of(name, wide[name]) for name in names}
    for given, want in _wanted(make, wide, names):
        try:
            found = run_trial(make, wide, names, given, names)
        except InputError:
            raise
        except Exception as error:  # the user's own code
            at = where(error) or place_of(make)
            raise FAILS_ON_PART.error(at, share=share, error=_first_line(error)) from error
        name, error_of = worst(found, want, start)
        if error_of > ALIKE:
            raise _together(make, given, share, name, error_of)


def _together(make: Make, given: Gradients, share: str, name: str, error: float) -> InputError:
    at, about = place_of(make), {"share": share, "name": name}
    if given is USUAL:
        return TOGETHER.error(at, **about, error=error)
    instead = GROUP_FOR_EACH if given.steady else CLIP_OR_SCALE
    return TOGETHER_WHERE.error(at, when=given.when, instead=instead, **about)


# --------------------------------------------------------------------------- the scheduler


def require_scheduler(trained: Mapping[str, nn.Parameter], make: Make | None, own: Make) -> None:
    """Step a scheduler on the optimizer of all trained parameters.

    Args:
        trained: the parameters; only names, shapes and types are used.
        make: `optimizer` of the model file; None: AdamW with its defaults.
        own: `scheduler` of the model file.

    Raises:
        InputError: it fails, needs a metric, or is no scheduler.
    """
    shapes = cut_short(shapes_of(trained))
    few = [(n, nn.Parameter(torch.zeros(s.size, dtype=s.dtype))) for n, s in shapes.items()]
    try:
        made = own((make or torch.optim.AdamW)(few))
        _require_steps(made, place_of(own))
        with warnings.catch_warnings():  # nothing is updated here
            warnings.simplefilter("ignore")
            for _ in range(_SCHEDULER_STEPS):
                made.step()
    except InputError:
        raise
    except Exception as error:  # the user's own code
        said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise SCHEDULER_FAILS.error(where(error) or place_of(own), error=said) from error


def _require_steps(made: Any, at: str) -> None:  # noqa: ANN401  # of any kind
    kind = type(made).__name__
    if not callable(getattr(made, "step", None)):
        raise NO_SCHEDULER.error(at, kind=kind)
    needed = needed_arguments(made.step)
    if needed:
        raise SCHEDULER_NEEDS_NUMBER.error(at, kind=kind, needed=", ".join(needed))


# --------------------------------------------------------------------------- a part of a parameter

MOST_NUMBERS = 4_000_000


def require_divided(model: nn.Module, make: Make, shards: Sequence[Shard]) -> None:
    """Try an optimizer with full parameters, and with each TP rank's shards.

    One parameter stands for all with the same sharding and names that differ in numbers alone.

    Raises:
        InputError: it updates a shard otherwise than that part of the full parameter.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    of = {(s.param, s.member): s for s in shards if s.param in trained}
    names = _representative(trained, of)
    shapes = {n: Shape(_few(trained[n], of.get((n, 0))), torch.float64) for n in names}
    with dice_kept():
        whole = run_trial(make, shapes, names)
        for member in sorted({number for _, number in of}):

            def cut(name: str, numbers: Tensor, member: int = member) -> Tensor:
                shard = of.get((name, member))
                return numbers if shard is None else taken(numbers, shard).contiguous()

            found = run_trial(make, shapes, names, cut=cut)
            want = {name: cut(name, whole[name]) for name in names}
            start = {name: cut(name, numbers_of(name, shapes[name])) for name in names}
            name, error = worst(found, want, start)
            if error > ALIKE:
                is_part = (name, member) in of
                what = f"the part of {name} that TP rank {member} has" if is_part else name
                raise LOOKS_AT_MORE_NUMBERS.error(place_of(make), what=what, error=error)


def _representative(
    trained: Mapping[str, nn.Parameter], of: Mapping[tuple[str, int], Shard]
) -> list[str]:
    found: dict[object, str] = {}
    for name, parameter in trained.items():
        shard = of.get((name, 0))
        layout = None if shard is None else (shard.dim, shard.size, shard.inner)
        found.setdefault((re.sub(r"\d+", "*", name), tuple(parameter.shape), layout), name)
    return list(found.values())


def _few(parameter: nn.Parameter, shard: Shard | None) -> tuple[int, ...]:
    """Return a parameter's shape; of a large one with the dimensions cut that are not divided."""
    size = list(parameter.shape)
    free = [dim for dim in range(len(size)) if shard is None or dim != shard.dim]
    while math.prod(size) > MOST_NUMBERS and any(size[dim] > 1 for dim in free):
        longest = max(free, key=lambda dim: size[dim])
        size[longest] //= 2
    return tuple(size)
